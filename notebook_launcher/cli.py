"""The command ``notebook-launcher``: what this machine has, whether launching works on it, and one whole model."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, Any

import typer

from notebook_launcher.core import config
from notebook_launcher.core.errors import CheckpointError, NotebookLauncherError
from notebook_launcher.launcher import preflight, warm
from notebook_launcher.launcher.device_table import device_table

if TYPE_CHECKING:
    from collections.abc import Iterator

_WRONG_USE = 2
_INTERRUPTED = 130  # as shells have it

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Run a notebook's function on every device.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """A line for Ctrl-C, which typer would end without a word."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("notebook-launcher: interrupted; what it had started is ended", err=True)
        raise typer.Exit(_INTERRUPTED) from None


@app.command()
def devices(*, as_json: AsJson = False) -> None:
    """Show what this machine has, what each device can do, why not otherwise, and what device="auto" would take."""
    with _interruptible():
        table = device_table(warm.devices(), config.snapshot())
    typer.echo(json.dumps(table.facts(), indent=2) if as_json else "\n".join(table.lines()))


@app.command("check", hidden=True)  # as the magic calls it
@app.command("test")
def check(
    *,
    device: Annotated[str | None, typer.Option(help="Kind of device; default: the best that is there.")] = None,
    num_processes: Annotated[
        int | None, typer.Option("-n", "--num-processes", help="Processes; default: one a device, on the CPU 2.")
    ] = None,
    device_ids: Annotated[str | None, typer.Option(help="Which devices, by number or UUID: 0,1.")] = None,
    as_json: AsJson = False,
) -> None:
    """Try out the workers: each precision, an all-reduce's value and time. Code 1 says that something is wrong."""
    with _interruptible():
        found = preflight.check(device=device, num_processes=num_processes, device_ids=device_ids)
    typer.echo(json.dumps(found.facts(), indent=2) if as_json else str(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command()
def merge(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of save_state, or of torch's distributed checkpoint.")],
    output: Annotated[Path, typer.Argument(help="Folder for the weights; it is made where there is none.")],
    *,
    model: Annotated[str, typer.Option(help="Name of its files: model_1 is the second that was prepared.")] = "model",
    max_shard_size: Annotated[str, typer.Option(help="Size that no file is larger than: 500MB, 2GiB.")] = "10GB",
    unsafe: Annotated[
        bool,
        typer.Option("--unsafe-serialization", "--unsafe_serialization", help="As torch.save, not in safetensors."),
    ] = False,
) -> None:
    """Write a model's whole weights from a checkpoint in parts, as transformers reads them; nothing is launched."""
    from notebook_launcher import merge_checkpoint  # it loads torch

    written: dict[str, Any] = {"max_shard_size": max_shard_size, "safe_serialization": not unsafe}
    with _interruptible():
        try:
            merge_checkpoint(checkpoint, output, model=model, **written)
        except OSError as error:
            raise CheckpointError(f"the weights in {checkpoint} could not be written to {output}: {error}") from error
    typer.echo(f"the weights of {model!r} in {checkpoint} are in {output}")


def main() -> None:
    """Run the command; what is wrong with its options, or with starting anything, is a line and code 2."""
    try:
        app()
    except NotebookLauncherError as error:
        typer.echo(f"notebook-launcher: {error}", err=True)
        raise SystemExit(_WRONG_USE) from None
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is to end the workers, which takes seconds at most


if __name__ == "__main__":
    main()
