"""The live form of a monitor: ipywidgets that any thread may paint, each part only when it has changed."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING

import ipywidgets as widgets  # type: ignore[import-untyped]

from notebook_launcher.widgets import monitor_html
from notebook_launcher.widgets.closing import close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.launcher.output import OutputLog
    from notebook_launcher.launcher.sinks import RunView
    from notebook_launcher.widgets.view_model import RankRow, View

_TEXT = "font-size:13px;line-height:1.4;width:100%"
_PAINT_S, _CURVES_S, _BEHIND_S = 0.1, 0.5, 2.0
_CPU_SHARE, _CPU_SHARE_OF_CURVES = 0.02, 0.01  # of a core, which the notebook's own code needs
_OUTPUT_BYTES_PER_S, _BEHIND_BYTES_PER_S = 300_000, 150_000  # of the tab in front, of all others together
_LINES_BEHIND = 60  # of a tab that is not in front, while its rank goes on writing
_FLOOD_LINES, _LINES_OF_FLOOD = 100, 200  # who gets so many between two looks reads none; of them the last are shown
_FLOOD_S = 0.4  # between two of its pictures: figures and the table change more often
_CALM_S = 1.0
_MAX_TABS = 16
_CHARS_SHOWN = 200_000  # of one rank while it goes on: a browser draws them several times a second
_BY_ITSELF = "While this cell runs, the notebook's own Stop (■) stops the run."


class Pane:
    """One HTML widget, painted when what it shows has changed, no faster than its pace allows."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        every_s: float = _PAINT_S,
        bytes_per_s: float = 100_000,
        cpu_share: float = _CPU_SHARE,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """At most once in ``every_s``, and on average ``bytes_per_s`` and ``cpu_share`` of a core, by ``cpu_clock``."""
        self.widget = widgets.HTML(layout=widgets.Layout(width="auto", margin="0 2px"))
        self.is_late = False  # whether there is something to paint that the pace has put off
        self._clock = clock
        self._every_s, self._bytes_per_s = every_s, bytes_per_s
        self._cpu_share, self._cpu_clock = cpu_share, cpu_clock
        self._next_s = 0.0
        self._key: object = None

    def paced_by(self, every_s: float, bytes_per_s: float) -> None:
        """From now on paint at this pace."""
        self._every_s, self._bytes_per_s = every_s, bytes_per_s

    @property
    def is_due(self) -> bool:
        """Whether its pace allows to paint it now."""
        return self._clock() >= self._next_s

    def offer(self, key: object, make: Callable[[], str], *, at_once: bool = False) -> None:
        """Show what ``make`` gives, if ``key`` says that it is new; ``at_once`` whatever the pace."""
        now_s = self._clock()
        self.is_late = key != self._key and not (at_once or self.is_due)
        if key == self._key or self.is_late:
            return
        self._key = key
        began_s = self._cpu_clock()
        page = make()
        page = f'<div style="{_TEXT}">{page}</div>' if page else ""
        if page != self.widget.value:
            self.widget.value = page
            num_bytes = len(page.encode()) + page.count('"') + page.count("\n")  # as it travels, in JSON
            by_cpu_s = (self._cpu_clock() - began_s) / self._cpu_share
            self._next_s = now_s + max(self._every_s, num_bytes / self._bytes_per_s, by_cpu_s)


@dataclasses.dataclass
class _Written:
    """How much a rank had written when it was looked at, and how it is shown."""

    num_lines: int = 0
    since_s: float = -math.inf  # when it was more than before
    is_flood: bool = False  # whether it came faster than anybody reads
    is_cut: bool = False  # whether only the end is shown meanwhile


class LiveView:
    """The widgets of one monitor. ``box`` holds them all."""

    def __init__(self, record: RunView, *, log_scale: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Make them; ``clock`` gives seconds. Whoever made this sets ``wake``, called when a person chose something."""
        self.wake: Callable[[], None] = lambda: None
        self._record = record
        self._clock = clock
        self._written = [_Written() for _ in range(record.num_ranks)]
        curves = Pane(clock, every_s=_CURVES_S, bytes_per_s=200_000, cpu_share=_CPU_SHARE_OF_CURVES)
        self._parts = {name: Pane(clock) for name in ("head", "clock", "hint", "error", "table")}
        self._parts |= {"curves": curves, "displays": Pane(clock)}
        self.stop_button = widgets.Button(description="Stop", layout=widgets.Layout(width="auto"))
        self.stop_button.on_click(self._stop)
        self.log_scale = _toggle("Logarithmic scale", "Draw the curves on a logarithmic scale", value=log_scale)
        self.hold = _toggle("Hold output", "Leave the output as it is while you read; nothing is lost", value=False)
        for toggle in (self.log_scale, self.hold):
            toggle.observe(self._chosen, "value")
        self._panes = [Pane(clock, bytes_per_s=_OUTPUT_BYTES_PER_S) for _ in range(self._num_panes)]
        self._looked_at = 0  # the rank whose output was in front when it was last painted
        self._is_chosen = False  # whether a person has said whose output is in front
        self._picker, output = self._output_box()
        controls = [self.stop_button, self.log_scale, self.hold]
        parts = {name: pane.widget for name, pane in self._parts.items()}
        displays = parts.pop("displays")
        self.box = widgets.VBox(
            [widgets.HBox(controls, layout=widgets.Layout(flex_flow="row wrap")), *parts.values(), output, displays],
            layout=widgets.Layout(width="auto", max_width="100%"),
        )
        self._ask_again()

    @property
    def _num_panes(self) -> int:
        return self._record.num_ranks if self._record.num_ranks <= _MAX_TABS else 1

    def _output_box(self) -> tuple[widgets.Widget, widgets.Widget]:
        """Tabs; for many ranks a choice, since that many tabs nobody finds anything in."""
        num_ranks = self._record.num_ranks
        if num_ranks <= _MAX_TABS:
            tab = widgets.Tab(children=[pane.widget for pane in self._panes], layout=widgets.Layout(width="auto"))
            for rank in range(num_ranks):
                tab.set_title(rank, f"rank {rank}")  # ipywidgets 7 ignores titles= of the constructor
            if num_ranks:
                tab.selected_index = 0
            tab.observe(self._chose_rank, "selected_index")
            return tab, tab
        picker = widgets.Dropdown(
            options=[(f"rank {rank}", rank) for rank in range(num_ranks)],
            value=0,
            description="Output of",
            tooltip="The rank whose output is shown",
        )
        picker.observe(self._chose_rank, "value")
        return picker, widgets.VBox([picker, self._panes[0].widget])

    @property
    def in_front(self) -> int:
        """The rank whose output is looked at."""
        chosen = self._picker.selected_index if isinstance(self._picker, widgets.Tab) else self._picker.value
        return int(chosen or 0)

    @property
    def curves_due(self) -> bool:
        """Whether ``paint`` would draw curves that have changed; else a view need not take in what they show."""
        return self._parts["curves"].is_due

    def paint(self, view: View, displays: Sequence[str], *, cell_runs: bool, at_once: bool = False) -> bool:
        """Show what is new; returns whether some of it has to wait for its pace."""
        ended = bool(view.summary)
        log_scale = self.log_scale.value
        clock = monitor_html.clock(view)
        hint = _BY_ITSELF if cell_runs and not ended else ""
        offers: dict[str, tuple[object, Callable[[], str]]] = {
            "head": ((view.state, view.headline, view.notes), lambda: monitor_html.head(view)),
            "clock": (clock, lambda: clock),
            "hint": (hint, lambda: f"<i>{hint}</i>" if hint else ""),
            "error": (view.error, lambda: monitor_html.error(view)),
            "table": (view.rows, lambda: monitor_html.table(view.rows)),
            "curves": ((view.plots, log_scale), lambda: monitor_html.drawings(view.plots, log_scale=log_scale)),
            "displays": (tuple(displays), lambda: "".join(displays)),
        }
        for name, (key, make) in offers.items():
            self._parts[name].offer(key, make, at_once=at_once)
        self._bring_to_front(view)
        for row in view.rows:
            if self._num_panes > 1 or row.rank == self.in_front or len(view.rows) == 1:
                self._paint_output(row, ended=ended, at_once=at_once)
        self._ask_again(view)
        return any(pane.is_late for pane in (*self._parts.values(), *self._panes))

    def _bring_to_front(self, view: View) -> None:
        """Put the output of the rank that made the run fail in front, where nobody has chosen one."""
        run = self._record.state
        rank = run.cause if run is not None else None
        if self._is_chosen or rank is None or rank == self.in_front or view.rows[rank].state.tone != "bad":
            return
        setattr(self._picker, "selected_index" if isinstance(self._picker, widgets.Tab) else "value", rank)
        self._is_chosen = False

    def close(self) -> None:
        """Empty the widgets, so that a saved notebook holds none of it twice, and close them."""
        for pane in (*self._parts.values(), *self._panes):
            pane.widget.value = ""
        close_all(self.box)

    def _paint_output(self, row: RankRow, *, ended: bool, at_once: bool) -> None:
        rank, now_s, log = row.rank, self._clock(), self._record.output
        holds = self.hold.value and not ended
        written = self._written[rank]
        if holds and not written.is_cut:
            return
        if written.num_lines != row.num_lines:
            written.is_flood = row.num_lines - written.num_lines > _FLOOD_LINES
            written.num_lines, written.since_s = row.num_lines, now_s
        pane = self._panes[rank if len(self._panes) > 1 else 0]
        in_front = rank == self.in_front
        pace_s = _FLOOD_S if written.is_flood else _PAINT_S
        pane.paced_by(*((pace_s, _OUTPUT_BYTES_PER_S) if in_front else self._pace_behind))
        is_calm = now_s - written.since_s > _CALM_S or (in_front and not written.is_flood)
        written.is_cut = not (ended or holds or is_calm)
        num_lines = (_LINES_OF_FLOOD if in_front else _LINES_BEHIND) if written.is_cut else monitor_html.LAST_LINES
        key = (rank, row.num_lines, tuple(log.live(rank)), num_lines, row.log_path)
        turned_to = in_front and rank != self._looked_at
        pane.offer(key, lambda: _output(row, log, num_lines), at_once=at_once or holds or turned_to)
        self._looked_at = rank if in_front else self._looked_at

    @property
    def _pace_behind(self) -> tuple[float, float]:
        return _BEHIND_S, _BEHIND_BYTES_PER_S / max(1, len(self._panes) - 1)

    def _stop(self, _button: object) -> None:
        self._record.stop()
        self.stop_button.description = "Stop at once"
        self.wake()

    def _ask_again(self, view: View | None = None) -> None:
        """Say what the stop button would do now."""
        word = view.state.word if view is not None else "running"
        ended = bool(view is not None and view.summary)
        description = "Stop at once" if word == "stopping" else "Stop"
        tooltip = "Kill every rank now" if word == "stopping" else "Interrupt every rank; a second time, kill them"
        for name, value in (("description", description), ("tooltip", tooltip), ("disabled", ended)):
            if getattr(self.stop_button, name) != value:
                setattr(self.stop_button, name, value)

    def _chose_rank(self, change: object) -> None:
        self._is_chosen = True
        self._chosen(change)

    def _chosen(self, _change: object) -> None:
        self.wake()


def _output(row: RankRow, log: OutputLog, num_lines: int) -> str:
    return monitor_html.output(row, log, last=num_lines, max_chars=_CHARS_SHOWN)


def _toggle(description: str, tooltip: str, *, value: bool) -> widgets.ToggleButton:
    return widgets.ToggleButton(
        value=value, description=description, tooltip=tooltip, layout=widgets.Layout(width="auto")
    )
