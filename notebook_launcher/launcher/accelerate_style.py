"""``notebook_launcher``: Accelerate's launching functions, so that a notebook changes its import line only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from notebook_launcher.core.errors import ConfigError
from notebook_launcher.launcher.launch import launch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from notebook_launcher.launcher.run import Run

_PORT = "29500"


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Run:
    """Run ``function(*args)`` on ``num_processes`` CPU processes, to try it out; return the ``Run``.

    Raises what ``launch`` raises.
    """
    return launch(function, args, num_processes=num_processes, device="cpu")


def notebook_launcher(  # noqa: PLR0913, PLR0917 - the signature is Accelerate's
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int | None = _PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Run:
    """Run ``function(*args)`` on ``num_processes`` processes (default: every device) and return the ``Run``.

    Arguments are those of ``accelerate.notebook_launcher``. ``use_port`` and ``master_addr`` matter only for several
    machines: on one, the system picks a free port. ``monitor_interval`` and ``log_line_prefix_template`` have no
    meaning here: ends are noticed at once, and lines carry their rank. Of the rendezvous, only "static" is there.
    Raises what ``launch`` raises.
    """
    del monitor_interval, log_line_prefix_template, rdzv_id
    if rdzv_backend != "static" or rdzv_endpoint or rdzv_conf:
        raise ConfigError(
            f"rdzv_backend={rdzv_backend!r}, rdzv_endpoint={rdzv_endpoint!r}, rdzv_conf={rdzv_conf!r}: only the static "
            "rendezvous is supported. Give master_addr, use_port, node_rank and num_nodes."
        )
    options: dict[str, Any] = {"max_restarts": max_restarts}
    if num_nodes > 1:
        options |= {
            "num_machines": num_nodes,
            "main_process_ip": master_addr,
            "main_process_port": use_port or _PORT,
        }
    if node_rank:
        options["machine_rank"] = node_rank  # on one machine too, where it is refused
    # "no" is this signature's default, so it is no choice: an Accelerator in the function may still make one.
    precision = None if mixed_precision in ("no", None) else mixed_precision
    return launch(function, args, num_processes=num_processes, mixed_precision=precision, **options)
