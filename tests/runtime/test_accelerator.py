import contextlib
import dataclasses
import inspect
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from notebook_launcher import Accelerator, ConfigError, DistributedDataParallelKwargs
from notebook_launcher.core import events


def identity():
    first, second = Accelerator(cpu=True), Accelerator(cpu=True, mixed_precision="bf16")
    first.wait_for_everyone()
    return (
        first.process_index,
        first.local_process_index,
        first.num_processes,
        first.is_main_process,
        first.is_local_main_process,
        first.is_last_process,
        first.use_distributed,
        str(first.distributed_type),
        str(first.device),
        (first.mixed_precision, second.mixed_precision),
    )


def test_a_process_knows_its_place(on_ranks):
    assert identity() == (0, 0, 1, True, True, True, False, "NO", "cpu", ("no", "bf16"))
    rest = (True, "MULTI_CPU", "cpu", ("no", "bf16"))
    assert on_ranks(identity) == [(0, 0, 2, True, True, False, *rest), (1, 1, 2, False, False, True, *rest)]


def test_alone_there_is_no_process_group():
    Accelerator(cpu=True)
    assert not torch.distributed.is_initialized()


def test_prepare_keeps_the_order_and_gives_one_back_bare():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = accelerator.prepare(scheduler, "text", model, None, optimizer, DataLoader([1]))
    assert [type(thing).__name__ for thing in prepared] == [
        "PreparedScheduler",
        "str",
        "Linear",
        "NoneType",
        "PreparedOptimizer",
        "PreparedLoader",
    ]
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(*prepared) == prepared
    assert accelerator.prepare(optimizer) is prepared[4]


def test_device_placement_needs_one_entry_an_object():
    with pytest.raises(ValueError, match="1 entries for 2 objects"):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1), nn.Linear(1, 1), device_placement=[True])


@pytest.mark.parametrize(
    ("call", "given", "told"),
    [
        ("prepare_model", 3, "takes a model, and was given 3, of type int"),
        ("prepare_model", nn.Linear, "takes a model, and was given .*Linear.*, of type type"),
        ("unscale_gradients", [3], "takes an optimizer, and was given 3, of type int"),
        ("prepare_optimizer", nn.Linear(1, 1), "takes an optimizer, and was given Linear.*, of type Linear"),
        ("prepare_scheduler", 3, "takes a learning-rate scheduler, and was given 3"),
        ("prepare_data_loader", [1], r"takes a DataLoader, and was given \[1\], of type list"),
        ("accumulate", 3, "takes prepared models, each as an argument of its own, and was given 3, of type int"),
        ("accumulate", [nn.Linear(1, 1)], r"takes prepared models, each as .* given \[Linear.*, of type list"),
        ("unwrap_model", 3, "takes a model, and was given 3"),
        ("register_for_checkpointing", nn.Linear, "takes objects, not their class, and was given .*Linear"),
        ("register_save_state_pre_hook", 3, "takes a function, and was given 3"),
        ("register_load_state_pre_hook", 3, "takes a function, and was given 3"),
        ("no_sync", [nn.Linear(1, 1)], r"takes a prepared model, and was given \[Linear"),
        ("trigger_sync_in_backward", 3, "takes a prepared model, and was given 3"),
        ("get_state_dict", 3, "takes a model, and was given 3"),
        ("backward", 0.5, "takes a loss as the model gave it, a tensor, and was given 0.5, of type float"),
        ("autocast", False, "takes an AutocastKwargs, and was given False"),
        ("profile", 3, "takes a ProfileKwargs, and was given 3"),
        ("log", 3, "takes names and values, such as {'loss': 0.5}, and was given 3"),
    ],
)
def test_what_a_method_does_not_take(call, given, told):
    accelerator = Accelerator(cpu=True)
    with pytest.raises(TypeError, match=rf"^{call} {told}"):
        getattr(accelerator, call)(given)
    with accelerator.accumulate(accelerator.prepare(nn.Linear(1, 1))):  # nothing wrong was kept
        pass


def test_an_optimizer_is_no_scheduler():
    with pytest.raises(TypeError, match=r"^prepare_scheduler takes a learning-rate scheduler, .* of type SGD"):
        Accelerator(cpu=True).prepare_scheduler(torch.optim.SGD([torch.ones(1)]))


@pytest.mark.parametrize(
    ("call", "given", "flag"),
    [
        ("save_state", ["folder"], "sharded"),
        ("save_state", ["folder"], "async_"),
        ("save_state", ["folder"], "safe_serialization"),
        ("load_state", ["folder"], "strict"),
        ("load_state", ["folder"], "skip_random_states"),
        ("save_model", [nn.Linear(1, 1), "folder"], "safe_serialization"),
        ("save", [{}, "file"], "safe_serialization"),
        ("prepare_model", [nn.Linear(1, 1)], "evaluation_mode"),
        ("split_between_processes", [[1]], "apply_padding"),
        ("pad_across_processes", [torch.ones(1)], "pad_first"),
        ("gather_for_metrics", [torch.ones(1)], "use_gather_object"),
        ("join_uneven_inputs", [[nn.Linear(1, 1)]], "even_batches"),
    ],
)
def test_a_word_is_no_flag_of_a_method(call, given, flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        contextlib.ExitStack() as stack,
        pytest.raises(ConfigError, match=f"^{flag}='no' is neither True nor False"),
    ):
        stack.enter_context(getattr(Accelerator(cpu=True), call)(*given, **{flag: "no"}))
    assert not list(tmp_path.iterdir())


def test_a_shard_size_is_looked_at_before_the_model_is_brought_together(tmp_path, monkeypatch):
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "_strategy", None)
    for size in (0, "0.5", "5 foo"):
        with pytest.raises(ConfigError, match=f"max_shard_size={size!r} is no size"):
            accelerator.save_model(nn.Linear(1, 1), tmp_path, max_shard_size=size)


def test_what_stands_in_a_container_is_said_to_stay_as_it_is():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(model.parameters()), torch.optim.Adam(model.parameters())]
    with pytest.warns(UserWarning, match="a list that holds a SGD, and prepares nothing in it; give each as") as seen:
        _, same = accelerator.prepare(model, optimizers)
    assert same is optimizers
    assert seen[0].filename == __file__
    with pytest.warns(UserWarning, match="prepare was given a dict that holds a Linear"):
        accelerator.prepare({"model": model})
    assert accelerator.prepare(["text"], [accelerator.prepare(optimizers[0])])[0] == ["text"]  # nothing is said


@pytest.mark.parametrize("given", [True, False])
def test_device_placement_is_given_object_by_object(given):
    with pytest.raises(TypeError, match=rf"device_placement=...\) takes a list of True or False, .* given {given}"):
        Accelerator(cpu=True).prepare(nn.Linear(1, 1), device_placement=given)


def only_somewhere():
    accelerator = Accelerator(cpu=True)
    return [
        decorator(lambda: accelerator.process_index)()
        for decorator in (
            accelerator.on_main_process,
            accelerator.on_main_process(),
            accelerator.on_local_main_process,
            accelerator.on_last_process,
            accelerator.on_process(process_index=1),
            accelerator.on_local_process(local_process_index=1),
        )
    ]


def test_decorators_say_who_runs(on_ranks):
    assert on_ranks(only_somewhere) == [[0, 0, 0, None, None, None], [None, None, None, 1, 1, 1]]


@pytest.mark.parametrize(("call", "name"), [("process", "process_index"), ("local_process", "local_process_index")])
@pytest.mark.parametrize("rank", [2, -1, "0"])
def test_a_function_that_would_run_nowhere_is_refused(on_ranks, call, name, rank):
    with pytest.raises(
        ConfigError, match=rf"on_{call}\({name}={rank!r}\).*no such rank among 2 processes; give 0 to 1"
    ):
        on_ranks(lambda: getattr(Accelerator(cpu=True), f"on_{call}")(**{name: rank}))


def test_alone_what_is_for_another_rank_runs():
    accelerator = Accelerator(cpu=True)
    decorators = accelerator.on_process(process_index=1), accelerator.on_local_process(local_process_index=1)
    assert [decorator(lambda: 5)() for decorator in decorators] == [5, 5]


@pytest.mark.parametrize("here", [2, 1])  # machines of 2 processes and of 1
def test_a_rank_of_another_machine_is_one(monkeypatch, here):
    accelerator = Accelerator(cpu=True)
    world = dataclasses.replace(accelerator._process.world, world_size=3, local_world_size=here, num_machines=2)
    monkeypatch.setattr(accelerator, "_process", dataclasses.replace(accelerator._process, world=world))
    accelerator.on_local_process(local_process_index=1)
    with pytest.raises(ConfigError, match=r"no such rank among 2 processes; give 0 to 1$"):
        accelerator.on_local_process(local_process_index=2)


def printing():
    Accelerator(cpu=True).print("only", "once")


def test_print_is_heard_once(on_ranks, capfd):
    on_ranks(printing)
    assert capfd.readouterr().out.count("only once") == 1


@pytest.fixture
def heard():
    heard = []
    events.install(heard.append)
    yield heard
    events.install(None)


def test_log_streams_plain_numbers(heard):
    Accelerator(cpu=True).log({"loss": torch.tensor(0.5, requires_grad=True), "n": 3}, step=torch.tensor(7))
    (metric,) = heard
    assert (metric.values, metric.step, type(metric.step)) == ({"loss": 0.5, "n": 3}, 7, int)
    assert metric.time_s > 0


def test_no_object_of_the_rank_is_sent_to_the_notebook(heard):
    accelerator = Accelerator(cpu=True)
    with pytest.warns(UserWarning, match="log does not show 'model', a Linear; give numbers, texts, or cont") as seen:
        accelerator.log({"model": nn.Linear(1, 1), "by_class": {"cat": torch.ones(2)}, "text": "x", "none": None})
    assert seen[0].filename == __file__
    assert heard[0].values == {"by_class": {"cat": [1.0, 1.0]}, "text": "x", "none": None}


@pytest.mark.parametrize("step", ["x", 1.5, -2])
def test_a_step_to_log_is_a_number(step, heard):
    with pytest.raises(ConfigError, match=f"step={step!r} is no number of a step"):
        Accelerator(cpu=True).log({"loss": 1}, step=step)
    assert not heard


@pytest.mark.parametrize(
    "argument",
    [
        "deepspeed_plugin",
        "fsdp_plugin",
        "parallelism_config",
    ],
)
def test_a_plugin_of_another_type_is_refused(argument):
    with pytest.raises(ConfigError, match=rf"{argument}='x' is of type str; give a \w+"):
        Accelerator(**{argument: "x"})


def test_the_signature_is_accelerates():
    names = list(inspect.signature(Accelerator).parameters)
    assert names[:5] == [
        "device_placement",
        "split_batches",
        "mixed_precision",
        "gradient_accumulation_steps",
        "cpu",
    ]


@pytest.mark.parametrize(
    "name",
    ["device_placement", "split_batches", "cpu", "step_scheduler_with_optimizer", "scheduler_steps_per_process"],
)
def test_a_word_is_no_flag(name):
    with pytest.raises(ConfigError, match=f"^{name}='no' is neither True nor False"):
        Accelerator(**{name: "no"})


def test_fp16_on_a_cpu_says_why_the_cpu_and_what_else():
    with pytest.raises(ConfigError) as caught:
        Accelerator(cpu=True, mixed_precision="fp16")
    for part in ("'fp16'", "'cpu'", "was given cpu=True", "'bf16'", "'no'"):
        assert part in str(caught.value)


def test_an_unknown_precision_gets_a_guess():
    with pytest.raises(ConfigError, match="Did you mean 'bf16'"):
        Accelerator(cpu=True, mixed_precision="bf15")


def choices(**arguments):
    accelerator = Accelerator(**arguments)
    return accelerator.mixed_precision, accelerator.gradient_accumulation_steps


def test_what_is_left_out_is_what_the_launch_chose(on_ranks):
    options = {"mixed_precision": "bf16", "gradient_accumulation_steps": 3, "num_processes": 1}
    assert on_ranks(choices, **options) == [("bf16", 3)]
    assert on_ranks(lambda: choices(mixed_precision="bf16"), num_processes=1) == [("bf16", 1)]


@pytest.mark.parametrize(
    ("arguments", "options", "both"),
    [
        ({"mixed_precision": "no"}, {"mixed_precision": "bf16"}, "'no'.*'bf16'"),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3}, "=2.*=3"),
    ],
)
def test_a_contradiction_names_both_values(on_ranks, arguments, options, both):
    with pytest.raises(ConfigError, match=both):
        on_ranks(lambda: choices(**arguments), num_processes=1, **options)


def test_cpu_contradicts_a_launch_on_cuda(monkeypatch):
    monkeypatch.setitem(os.environ, "NOTEBOOK_LAUNCHER_DEVICE", "cuda")
    with pytest.raises(ConfigError, match=r"cpu=True.*device='cuda'"):
        Accelerator(cpu=True)


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_a_number_of_steps_that_is_none(steps):
    with pytest.raises(ConfigError, match=f"gradient_accumulation_steps={steps}"):
        Accelerator(cpu=True, gradient_accumulation_steps=steps)


@pytest.mark.parametrize("steps", [0, -1, 1.5, "4", None])
def test_the_number_of_steps_can_not_be_set_to_none(steps):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=rf"gradient_accumulation_steps={steps!r}.*1 or more"):
        accelerator.gradient_accumulation_steps = steps
    assert accelerator.gradient_accumulation_steps == 2


def test_the_number_of_steps_can_be_changed():
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 2
    model = nn.Linear(1, 1, bias=False)
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert model.weight.grad.item() == 0.5


def clipped():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(model)
    norms, gradients = [], []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
        gradients.append(next(model.parameters()).grad.item())
    return norms, gradients


def test_only_whole_groups_are_clipped(on_ranks):
    for norms, gradients in on_ranks(clipped):
        assert norms == [2.0, 4.0]
        assert gradients == pytest.approx([2.0, 1.0], abs=1e-5)


def uneven_models():
    """A generator and a discriminator whose groups are counted once, and exchanged together."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    given = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    models = accelerator.prepare(*given)
    x = torch.ones(1, 1) * (1 + accelerator.process_index)
    found = []
    for _ in range(2):
        with accelerator.accumulate(*models):
            accelerator.backward(sum(model(x) for model in models).sum())
        found.append((accelerator.sync_gradients, [module.weight.grad.item() for module in given]))
    return found


def test_several_models_are_accumulated_at_once(on_ranks):
    first, second = on_ranks(uneven_models)
    assert first[0] == (False, [0.5, 0.5])
    assert second[0] == (False, [1.0, 1.0])
    assert first[1] == second[1] == (True, [1.5, 1.5])


def test_an_optimizer_made_from_another_model_is_refused():
    accelerator = Accelerator(cpu=True)
    other = nn.Linear(3, 1)
    with pytest.raises(ConfigError) as caught:
        accelerator.prepare(nn.Sequential(nn.Linear(1, 1)), torch.optim.SGD(other.parameters()))
    for part in ("Sequential", "SGD over 2 other parameters", "first of the shape (1, 3)", "call of its own"):
        assert part in str(caught.value)
    assert accelerator.prepare(torch.optim.SGD(other.parameters())).param_groups, "alone it is for the user to say"


def test_an_optimizer_whose_model_s_parameters_were_made_anew_is_refused(monkeypatch):
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    monkeypatch.setattr(model, "to", lambda _device: nn.Linear(1, 1))  # as where a device needs tensors of its own
    with pytest.raises(ConfigError, match="none is in a prepared model"):
        accelerator.prepare(optimizer, model)


def test_parameters_of_no_model_may_be_trained_beside_one():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    temperature = torch.optim.SGD([nn.Parameter(torch.ones(()))])
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters()), temperature)
    assert prepared[2].optimizer is temperature
    frozen = nn.Linear(1, 1).requires_grad_(requires_grad=False)
    assert accelerator.prepare(frozen, torch.optim.SGD([nn.Parameter(torch.ones(()))]))


def test_objects_may_come_before_what_they_belong_to():
    accelerator, model = Accelerator(cpu=True), nn.Linear(1, 1)
    optimizer, prepared = accelerator.prepare(torch.optim.SGD(model.parameters()), model)
    assert (type(optimizer).__name__, prepared) == ("PreparedOptimizer", model)


def synced_late():
    """Two forwards under no_sync, whose second backward exchanges gradients all the same."""
    accelerator = Accelerator(cpu=True)
    given = nn.Linear(1, 1, bias=False)
    model = accelerator.prepare(given)
    with accelerator.no_sync(model):
        first, second = (model(torch.full((1, 1), 1.0 + accelerator.process_index)).sum() for _ in range(2))
        accelerator.backward(first)
        apart = given.weight.grad.item()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(second)
    return apart, given.weight.grad.item()


def test_a_backward_under_no_sync_can_exchange_all_the_same(on_ranks):
    assert synced_late() == (1.0, 2.0)
    assert on_ranks(synced_late) == [(1.0, 3.0), (2.0, 3.0)]


def synced_late_with_unused():
    keywords = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[keywords])
    with accelerator.trigger_sync_in_backward(accelerator.prepare(nn.Linear(1, 1))):
        pass


def test_unused_parameters_can_not_be_found_that_late(on_ranks):
    with pytest.raises(ConfigError, match="find_unused_parameters=True"):
        on_ranks(synced_late_with_unused)


def test_gradients_are_clipped_by_value_in_whole_groups():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    gradients = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 1), 4.0)).sum())
            accelerator.clip_grad_value_(model.parameters(), 1.5)
        gradients.append(model.weight.grad.item())
    assert gradients == [2.0, 1.5]
    model.weight.grad.fill_(-9)
    accelerator.clip_grad_value_(model.weight, 1.5)
    assert model.weight.grad.item() == -1.5


@pytest.mark.parametrize("limit", [-1.0, float("nan")])
@pytest.mark.parametrize(("call", "name"), [("clip_grad_norm_", "max_norm"), ("clip_grad_value_", "clip_value")])
def test_what_would_turn_gradients_around_is_no_limit(call, name, limit):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(ConfigError, match=rf"{call}\({name}={limit}\).*give 0 or more"):
        getattr(accelerator, call)(model.parameters(), limit)
    assert model.weight.grad.item() == 1
    getattr(accelerator, call)(model.parameters(), float("inf"))
    getattr(accelerator, call)(model.parameters(), 0)
    assert model.weight.grad.item() == 0


def test_context_parallel_changes_nothing():
    buffer = torch.ones(2)
    with Accelerator(cpu=True).maybe_context_parallel(buffers=[buffer], buffer_seq_dims=[0]):
        assert buffer.shape == (2,)


def evaluated():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(nn.Linear(1, 1), evaluation_mode=True)
    return isinstance(model, nn.parallel.DistributedDataParallel), str(model(torch.ones(1, 1)).dtype)


def test_a_model_to_evaluate_is_not_spread(on_ranks):
    assert on_ranks(evaluated) == [(False, "torch.float32")] * 2


def test_models_stay_where_they_are_without_device_placement(monkeypatch):
    moved = []
    monkeypatch.setattr(nn.Linear, "to", lambda self, device: moved.append(str(device)) or self)
    Accelerator(cpu=True, device_placement=False).prepare(nn.Linear(1, 1))
    Accelerator(cpu=True).prepare(nn.Linear(1, 1), DataLoader([1]), device_placement=[False, True])
    assert moved == []
    Accelerator(cpu=True).prepare(nn.Linear(1, 1))
    assert moved == ["cpu"]
