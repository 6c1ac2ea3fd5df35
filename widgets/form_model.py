"""``FormModel``: what the form asks, says and refuses, and what is launched from it. No widgets.

It holds what a person typed. Everything else, the controls, what is wrong with them, the sentence and the launch, is
worked out anew from that, the notebook and the machine.
"""

from __future__ import annotations

import dataclasses
import keyword
import re
from typing import TYPE_CHECKING, Any

from notebook_launcher.core.config import LaunchConfig, field_rows, snapshot
from notebook_launcher.core.errors import ConfigError
from notebook_launcher.core.strategies import STRATEGIES
from notebook_launcher.launcher.plan import make_plan
from notebook_launcher.launcher.run import Run
from notebook_launcher.widgets import call_model, option_controls, strategy_options
from notebook_launcher.widgets.argument_controls import Argument, arguments
from notebook_launcher.widgets.controls import Choice, Control, Held, one_of
from notebook_launcher.widgets.functions import Functions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from notebook_launcher.core.events import DeviceRow
    from notebook_launcher.widgets.code import CallText

FUNCTION, KEPT_AS = "function", "kept_as"
_NO_FUNCTION = (
    "The notebook defines no function yet. Run a cell with one, such as def train(num_epochs=3): ..., and it is "
    "offered here."
)
_LOOKING = "looking at this machine's devices ..."


class FormError(Exception):
    """Nothing was ``undone``; ``texts`` says why beside each control, "" being the form as a whole."""

    def __init__(self, texts: Mapping[str, str], undone: str = "launched") -> None:
        super().__init__("\n".join(texts.values()))
        self.texts = dict(texts)
        self.undone = undone


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What the form stands for: ``launch(function, args, kwargs, config=config)``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: LaunchConfig


class FormModel:
    """The form over one notebook. Not safe to use from several threads at once."""

    def __init__(
        self,
        namespace: Mapping[str, Any],
        *,
        strategies: Sequence[str] = STRATEGIES.names,
        cell_numbers: Callable[[], Mapping[str, int]] = dict,
        environment: Callable[[], Mapping[str, str]] = snapshot,
    ) -> None:
        """Begin with what the environment says; ``namespace`` holds the notebook's variables, as they come and go.

        ``cell_numbers`` gives, for the file name that a cell was compiled with, the cell's number.
        """
        self._namespace = namespace
        self._strategies = strategies
        self._cell_numbers = cell_numbers
        self._environment = environment
        self._functions = Functions()
        self._function: str | None = None  # None: nobody has chosen, so it is the last defined
        self._typed: dict[str, Held] = {}  # by control, where it differs from what the control began with
        self._typed_arguments: dict[str, dict[str, Held]] = {}  # by function and control
        self._late: dict[str, str] = {}  # what only evaluating has shown, until the control changes
        self._notice = ""  # about the function, until the next launch
        self._num_redefined = 0
        self._arguments: tuple[Argument, ...] = ()
        self._loaded: LaunchConfig | None = None
        self._kept: Any = None  # the last run that was put into the notebook
        self._start = LaunchConfig()
        self._start_error = ""
        self.devices: Sequence[DeviceRow] | None = None  # None until the machine has been looked at
        self.look()

    # --- what comes in ------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """See which functions the notebook defines by now, and what the environment says."""
        name = self.function_name
        changed = self._functions.look(self._namespace, self._cell_numbers())
        if name in changed and self._functions.get(name) is not None:
            self._redefined(name)
        elif self.function_name != name or name in changed:
            self._arguments = arguments(self._functions.get(self.function_name))
        try:
            self._start, self._start_error = LaunchConfig.make(self._loaded, environment=self._environment()), ""
        except ConfigError as error:
            self._start, self._start_error = self._loaded or LaunchConfig(), str(error)

    def set(self, name: str, held: Held) -> None:
        """A person has changed a control."""
        self._late.pop(name, None)
        self._late.pop("", None)
        if name == FUNCTION:
            self._function, self._notice = str(held), ""
            self._arguments = arguments(self._functions.get(self._function))
            return
        control = next(one for one in self.controls() if one.name == name)
        typed = self._typed
        if control.group == "argument":
            self._function = self.function_name  # from here on, a function that is defined later doesn't take its place
            typed = self._typed_arguments.setdefault(self._function, {})
        typed[name] = held
        if held == control.default:
            del typed[name]

    def load(self, config: LaunchConfig) -> None:
        """Show ``config``'s options, in place of all that was typed for them."""
        self._loaded = config
        self._typed = {KEPT_AS: self._typed[KEPT_AS]} if KEPT_AS in self._typed else {}
        self._late.clear()
        self.look()

    # --- what is shown ------------------------------------------------------------------------------------------------

    @property
    def function_name(self) -> str:
        """The chosen function's, "" while there is none."""
        return self._function or next(iter(self._functions.names), "")

    @property
    def notice(self) -> str:
        """What a person should know of the function: it takes other arguments than it did."""
        return self._notice

    def controls(self) -> tuple[Control, ...]:
        """Every control that is shown now, in the order of the form."""
        device = str(self._typed.get("device", self._start.device))
        held = str(self._typed.get("strategy", ""))
        options = option_controls.option_controls(self._start, device, self.devices, self._strategies, held)
        own = [strategy_options.control(one, self._start.extra) for one in self._strategy_options()]
        place = next(i for i, one in enumerate(options, 1) if one.name == "strategy")
        return (
            self._function_control(),
            *(one.control for one in self._arguments),
            *options[:place],
            *own,
            *options[place:],
            self._kept_as_control(),
        )

    def held(self, control: Control) -> Held:
        """What the control holds: what was typed, else what it began with."""
        if control.name == FUNCTION:
            return self.function_name
        typed = self._typed_arguments.get(self.function_name, {}) if control.group == "argument" else self._typed
        return typed.get(control.name, control.default)

    def errors(self) -> dict[str, str]:
        """What stands in the way, by control, as far as it can be told without evaluating anything."""
        found = {**self._function_errors(), **self._kept_as_errors()}
        found.update(
            call_model.errors(self._arguments, self._typed_arguments.get(self.function_name, {}), self._namespace)
        )
        found.update(self._option_errors())
        return {**self._late, **found}

    def sentence(self) -> str:
        """In one line what a launch will do; "" where the options can't be."""
        if self._option_errors():
            return ""
        config = self._config()
        if self.devices is None and config.device != "cpu":
            return _LOOKING
        return make_plan(config, self._rows, environment=self._environment()).headline

    # --- what comes out -----------------------------------------------------------------------------------------------

    def chosen(self) -> Chosen:
        """What is to be launched, the arguments evaluated; raises ``FormError``."""
        num_told = self._num_redefined
        self._function = self.function_name or None  # the one that is shown, whatever has been defined meanwhile
        self.look()
        name = self.function_name
        if self._num_redefined > num_told:
            raise FormError({FUNCTION: self._notice})
        self._raise_errors()
        typed = self._typed_arguments.get(name, {})
        try:
            args, kwargs = call_model.values(self._arguments, typed, self._namespace)
        except call_model.CallError as error:
            self._late = error.texts
            raise FormError(error.texts) from error.__cause__
        function = self._functions.get(name)
        assert function is not None  # noqa: S101 - there would be errors
        self._notice = ""
        return Chosen(function, args, kwargs, self._config())

    def config(self, undone: str = "saved") -> LaunchConfig:
        """The options, whatever the function; raises ``FormError``, which says what was not done with them."""
        self.look()
        found = self._option_errors()
        if found:
            raise FormError(found, undone)
        return self._config()

    def config_of_check(self) -> LaunchConfig:
        """The same for a check, which a training's time limit is not for; raises ``FormError``."""
        return self.config("checked").model_copy(update={"timeout_s": None})

    def code(self) -> tuple[CallText, dict[str, Any]]:
        """The call as text and the options that it must say; raises ``FormError``."""
        self._raise_errors()
        typed = self._typed_arguments.get(self.function_name, {})
        return call_model.text(self.function_name, self._arguments, typed, self._namespace), self._said()

    @property
    def kept_as(self) -> str:
        """The notebook's variable for the run, "" for none."""
        return str(self._typed.get(KEPT_AS, self._kept_as_control().default)).strip()

    def kept(self, run: Any) -> None:
        """The notebook's variable holds ``run`` now, and may hold the next."""
        self._kept = run

    # --- inside -------------------------------------------------------------------------------------------------------

    def _raise_errors(self) -> None:
        self._late.clear()
        found = self.errors()
        if found:
            raise FormError(found)

    def _redefined(self, name: str) -> None:
        before = {one.control for one in self._arguments}
        self._arguments = arguments(self._functions.get(name))
        now = {one.control for one in self._arguments}
        typed = self._typed_arguments.get(name, {})
        for each in [one.name for one in before - now]:
            typed.pop(each, None)
        if before != now:
            self._num_redefined += 1
            self._notice = f"{name} has been defined anew, with other arguments. Look at them, then launch."

    def _function_control(self) -> Control:
        names = self._functions.names
        gone = () if self.function_name in names else (self.function_name,)
        choices = [Choice(name, name) for name in names]
        choices += [Choice(name, f"{name} (gone)" if name else "none yet", self._gone(name)) for name in gone]
        return Control(
            FUNCTION, "Function", "choice", choices=tuple(choices), help="What every process runs.", group="function"
        )

    def _gone(self, name: str) -> str:
        if not name:
            return _NO_FUNCTION
        return f"The notebook no longer defines {name}. Run its cell again, or choose another function."

    def _function_errors(self) -> dict[str, str]:
        refused = self._function_control().refusals.get(self.function_name)
        return {FUNCTION: refused} if refused else {}

    def _kept_as_control(self) -> Control:
        free = next((name for name in ("run", "launched_run") if self._may_hold_run(name)), "")
        told = "Notebook variable for the run: run.results, run.logs(rank), run.metrics, run.stop()."
        return Control(KEPT_AS, "Keep run as", "text", default=free, help=told, placeholder="not kept")

    def _may_hold_run(self, name: str) -> bool:
        return (
            name not in self._namespace or self._namespace[name] is self._kept or isinstance(self._namespace[name], Run)
        )

    def _kept_as_errors(self) -> dict[str, str]:
        name = self.kept_as
        if name and (not name.isidentifier() or keyword.iskeyword(name)):
            return {KEPT_AS: f"{name!r} can't be: it takes a variable's name, such as run, or nothing."}
        if name and not self._may_hold_run(name):
            kind = type(self._namespace[name]).__name__
            return {KEPT_AS: f"{name} is a {kind} of the notebook's, which the run would replace: choose another name."}
        return {}

    def _strategy_options(self) -> tuple[strategy_options.StrategyOption, ...]:
        strategy = self._typed.get("strategy", self._start.strategy or "")
        return strategy_options.options_of(strategy) if strategy in self._strategies else ()

    def _option_errors(self) -> dict[str, str]:
        """What is wrong with one option, else what is wrong with them together, else what the machine can't do."""
        if self._start_error:
            return {"": self._start_error}
        found = {}
        controls = {one.name: one for one in self.controls()}
        for row in field_rows():
            control = controls[row.name]
            given = self.held(control)
            refused = one_of(control.choices, given)
            if refused is not None and refused.refused:
                found[row.name] = refused.refused
                continue
            try:
                LaunchConfig(**{row.name: option_controls.read(row, given)})
            except ConfigError as error:
                outside = str(error).startswith((f"{row.name}=", f"{row.name} holds"))
                of_value = outside and f": {row.name} takes " in str(error)
                found[row.name] = option_controls.complaint(row, given) if of_value else str(error)
            except ValueError as error:
                found[row.name] = str(error)
        return found or self._together()

    def _together(self) -> dict[str, str]:
        try:
            config = self._config()
            if self.devices is not None or config.device == "cpu":
                make_plan(config, self._rows, environment=self._environment())
        except ConfigError as error:
            text = str(error)
            places = {row.name: re.search(rf"\b{row.name}\b", text) for row in field_rows()}
            named = {name: place.start() for name, place in places.items() if place}
            return {min(named, key=lambda name: named[name]) if named else "": text}
        return {}

    def _rows(self) -> Sequence[DeviceRow]:
        return self.devices or ()

    def _whole(self) -> LaunchConfig:
        """Every option as the form shows it."""
        controls = {one.name: one for one in self.controls()}
        given = {row.name: option_controls.read(row, self.held(controls[row.name])) for row in field_rows()}
        extra = self._start.extra
        for option in self._strategy_options():
            extra = strategy_options.put(option, self.held(controls[option.name]), extra)
        return LaunchConfig(**given, extra=extra)

    def _said(self) -> dict[str, Any]:
        """The options that a launch must be told, since it would take others by itself."""
        whole, plain = self._whole(), LaunchConfig.make(environment=self._environment())
        names = [*(row.name for row in field_rows()), "extra"]
        return {name: getattr(whole, name) for name in names if getattr(whole, name) != getattr(plain, name)}

    def _config(self) -> LaunchConfig:
        said = self._said()
        unset = {name: None for name, value in said.items() if value is None}
        return LaunchConfig.make(
            LaunchConfig(**unset) if unset else None,
            environment=self._environment(),
            **{name: value for name, value in said.items() if value is not None},
        )
