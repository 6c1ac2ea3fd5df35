"""The names and signatures that code written for Accelerate uses: all of them, with the same arguments and defaults.

``...`` stands for a default of our own choosing. Arguments beyond these may only be ones that can be left out.
"""

import inspect

import pytest
import torch
from torch import nn

import notebook_launcher
from notebook_launcher import Accelerator

SIGNATURES = {
    "Accelerator": """
        device_placement=True, split_batches=False, mixed_precision=None, gradient_accumulation_steps=1, cpu=False,
        dataloader_config=None, deepspeed_plugin=None, fsdp_plugin=None, rng_types=None, log_with=None,
        project_dir=None, project_config=None, gradient_accumulation_plugin=None, step_scheduler_with_optimizer=True,
        kwargs_handlers=None, dynamo_backend=None, parallelism_config=None""",
    # state and identity
    "Accelerator.print": "*args, **kwargs",
    "Accelerator.on_main_process": "function=None",
    "Accelerator.on_local_main_process": "function=None",
    "Accelerator.on_last_process": "function=None",
    "Accelerator.on_process": "function=None, process_index=...",
    "Accelerator.main_process_first": "",
    "Accelerator.local_main_process_first": "",
    "Accelerator.wait_for_everyone": "",
    "Accelerator.split_between_processes": "inputs, apply_padding=False",
    "Accelerator.set_trigger": "",
    "Accelerator.check_trigger": "",
    # preparing and stepping
    "Accelerator.prepare": "*args, device_placement=None",
    "Accelerator.prepare_model": "model, device_placement=None, evaluation_mode=False",
    "Accelerator.prepare_optimizer": "optimizer, device_placement=None",
    "Accelerator.prepare_scheduler": "scheduler",
    "Accelerator.prepare_data_loader": "data_loader, device_placement=None",
    "Accelerator.backward": "loss, **kwargs",
    "Accelerator.accumulate": "*models",
    "Accelerator.no_sync": "model",
    "Accelerator.trigger_sync_in_backward": "model",
    "Accelerator.join_uneven_inputs": "joinables, even_batches=None",
    "Accelerator.clip_grad_norm_": "parameters, max_norm, norm_type=2",
    "Accelerator.clip_grad_value_": "parameters, clip_value",
    "Accelerator.unscale_gradients": "optimizer=None",
    "Accelerator.autocast": "autocast_handler=None",
    "Accelerator.unwrap_model": "model, keep_fp32_wrapper=True, keep_torch_compile=True",
    "Accelerator.free_memory": "*objects",
    "Accelerator.clear": "*objects",
    "Accelerator.maybe_context_parallel": "buffers=None, buffer_seq_dims=None, no_restore_buffers=None",
    "Accelerator.profile": "profile_handler=None",
    # collectives
    "Accelerator.gather": "tensor",
    "Accelerator.gather_for_metrics": "input_data, use_gather_object=False",
    "Accelerator.reduce": "tensor, reduction='sum', scale=1.0",
    "Accelerator.pad_across_processes": "tensor, dim=0, pad_index=0, pad_first=False",
    # saving
    "Accelerator.save_state": "output_dir=None, safe_serialization=True",
    "Accelerator.load_state": "input_dir=None",
    "Accelerator.register_for_checkpointing": "*objects",
    "Accelerator.register_save_state_pre_hook": "hook",
    "Accelerator.register_load_state_pre_hook": "hook",
    "Accelerator.save_model": "model, save_directory, max_shard_size='10GB', safe_serialization=True",
    "Accelerator.save": "obj, f, safe_serialization=False",
    "Accelerator.get_state_dict": "model, unwrap=True",
    # trackers
    "Accelerator.init_trackers": "project_name, config=None, init_kwargs=...",
    "Accelerator.log": "values, step=None, log_kwargs=...",
    "Accelerator.get_tracker": "name, unwrap=False",
    "Accelerator.end_training": "",
    # functions and classes
    "PartialState": "cpu=False, **kwargs",
    "AcceleratorState": "mixed_precision=None, cpu=False",
    "GradientState": "",
    "gather": "tensor",
    "gather_object": "object",
    "broadcast": "tensor, from_process=0",
    "broadcast_object_list": "object_list, from_process=0",
    "reduce": "tensor, reduction=..., scale=1.0",
    "pad_across_processes": "tensor, dim=0, pad_index=0, pad_first=False",
    "skip_first_batches": "dataloader=..., num_batches=0",
    "set_seed": "seed, device_specific=False, deterministic=False",
    "find_executable_batch_size": "function=None, starting_batch_size=128",
    "get_logger": "name, log_level=None",
    "tqdm": "*args, main_process_only=True, **kwargs",
    "LocalSGD": "accelerator, model, local_sgd_steps, enabled=True",
    "init_empty_weights": "include_buffers=None",
    "DataLoaderConfiguration": """
        split_batches=False, dispatch_batches=None, even_batches=True, use_seedable_sampler=False, data_seed=None,
        non_blocking=False, use_stateful_dataloader=False""",
    "GradientAccumulationPlugin": """
        num_steps=None, adjust_scheduler=True, sync_with_dataloader=True, sync_each_batch=False""",
    "ProjectConfiguration": """
        project_dir=None, logging_dir=None, automatic_checkpoint_naming=False, total_limit=None, iteration=0,
        save_on_each_node=False""",
    "DistributedDataParallelKwargs": """
        dim=0, broadcast_buffers=True, bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False,
        gradient_as_bucket_view=False, static_graph=False, comm_hook=..., comm_wrapper=..., comm_state_option=...""",
    "DeepSpeedPlugin": """
        hf_ds_config=None, gradient_accumulation_steps=None, gradient_clipping=None, zero_stage=None,
        is_train_batch_min=True, offload_optimizer_device=None, offload_param_device=None,
        offload_optimizer_nvme_path=None, offload_param_nvme_path=None, zero3_init_flag=None,
        zero3_save_16bit_model=None""",
    "DummyOptim": "params, lr=0.001, weight_decay=0, **kwargs",
    "DummyScheduler": "optimizer, total_num_steps=None, warmup_num_steps=0, lr_scheduler_callable=None",
    "GradScalerKwargs": "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True",
    "InitProcessGroupKwargs": "backend=..., init_method=None, timeout=...",
    "AutocastKwargs": "enabled=True, cache_enabled=None",
    "ProfileKwargs": """
        activities=None, schedule_option=None, on_trace_ready=None, record_shapes=False, profile_memory=False,
        with_stack=False, with_flops=False, with_modules=False, output_trace_dir=None""",
    "notebook_launcher": "function, args=(), num_processes=None, mixed_precision='no', use_port='29500'",
    "debug_launcher": "function, args=(), num_processes=2",
}
NAMES = (
    *("DistributedType.NO", "DistributedType.MULTI_CPU", "DistributedType.MULTI_GPU"),
    *("GeneralTracker.store_init_configuration", "GeneralTracker.log", "GeneralTracker.finish"),
)
FACTS = (
    *("device", "process_index", "local_process_index", "num_processes", "is_main_process", "is_local_main_process"),
    *("is_last_process", "distributed_type", "mixed_precision", "use_distributed", "sync_gradients", "even_batches"),
    *("gradient_accumulation_steps", "project_dir", "logging_dir", "optimizer_step_was_skipped", "split_batches"),
    *("state", "save_iteration"),
)
STATE_FACTS = {
    "PartialState": ("device", "process_index", "local_process_index", "num_processes", "is_main_process"),
    "AcceleratorState": ("device", "process_index", "num_processes", "mixed_precision", "distributed_type"),
    "GradientState": ("sync_gradients", "num_steps", "end_of_dataloader", "remainder", "in_dataloader"),
}
PREPARED = {
    "loader": (
        *("total_batch_size", "total_dataset_length", "dataset", "end_of_dataloader", "remainder", "set_epoch"),
        *("batch_size", "__len__"),
    ),
    "optimizer": ("step", "zero_grad", "state_dict", "load_state_dict", "param_groups", "step_was_skipped"),
    "scheduler": ("step", "get_last_lr", "state_dict", "load_state_dict"),
}


def found(path):
    thing = notebook_launcher
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


def parameters_of(text):
    names = {}
    exec(f"def function({' '.join(text.split())}): pass", names)  # noqa: S102 - a line of the table above
    return list(inspect.signature(names["function"]).parameters.values())


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_have_accelerates_names_places_and_defaults(path):
    ours = list(inspect.signature(found(path)).parameters.values())
    ours = [one for one in ours if one.name != "self"]
    theirs = parameters_of(SIGNATURES[path])
    for place, one in enumerate(theirs):
        if one.kind in {one.VAR_POSITIONAL, one.VAR_KEYWORD}:
            assert any(other.kind == one.kind for other in ours), one
            continue
        mine = next((other for other in ours if other.name == one.name), None)
        takes_any = any(other.kind == one.VAR_KEYWORD for other in ours)
        assert mine is not None or (takes_any and one.kind == one.KEYWORD_ONLY), one
        if one.kind == one.POSITIONAL_OR_KEYWORD:
            assert mine is ours[place], (one, ours[place])
        if mine is not None and one.default is not ...:
            assert mine.default == one.default, mine
    names = {one.name for one in theirs}
    for mine in ours:
        assert (
            mine.name in names or mine.default is not mine.empty or mine.kind in {mine.VAR_POSITIONAL, mine.VAR_KEYWORD}
        )


@pytest.mark.parametrize("path", NAMES)
def test_a_name_is_there(path):
    assert found(path) is not None


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_can_be_read(name):
    assert hasattr(Accelerator(cpu=True), name)


@pytest.mark.parametrize("kind", STATE_FACTS)
def test_a_states_facts_can_be_read(kind):
    Accelerator(cpu=True)
    assert [name for name in STATE_FACTS[kind] if not hasattr(found(kind)(), name)] == []


@pytest.mark.parametrize("kind", PREPARED)
def test_what_is_prepared_has_its_attributes(kind):
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    things = {
        "loader": torch.utils.data.DataLoader([1, 2]),
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    prepared = Accelerator(cpu=True).prepare(things[kind])
    assert [name for name in PREPARED[kind] if not hasattr(prepared, name)] == []
