"""What only a real kernel shows: the numbers of cells, what a failed cell looks like, completion as it is set there."""

from __future__ import annotations

import IPython

# IPython 7 keeps no record of which cell a file is; a launched cell's name says it all the same.
IN = 'File "Cell In[{}]"' if IPython.version_info[0] < 8 else "Cell In[{}]"


def test_a_cell_s_places_its_syntax_errors_and_its_completion(kernel):
    kernel.ok("%load_ext notebook_launcher\ndef train(n): return 1 / n")
    failed = kernel.run("%%launch -n 1\nx = 1\n1 / 0")
    assert f"{IN.format(2)}, line 3, in <module>" in failed.traceback
    failed = kernel.run("x = 1\n\nrun = %launch -n 1 train(0)")
    assert f"{IN.format(3)}, line 3, in <module>" in failed.traceback
    kernel.ok("def go():\n    %launch -n 1 train(0)")
    failed = kernel.run("\n\n\ngo()")
    assert f"{IN.format(4 if IPython.version_info[0] > 7 else 5)}, line 2, in <module>" in failed.traceback
    failed = kernel.run("%%launch -n 2\nx = 1\ny = = 2\n")
    assert failed.error
    place, *rest = failed.traceback.strip().splitlines()
    assert place == f"{IN.format(6)}, line 3"
    assert [line.strip() for line in rest] == ["y = = 2", "^", "SyntaxError: invalid syntax"]
    failed = kernel.run(
        "from notebook_launcher import ConfigError\ndef own(): raise ConfigError('mine')\n%launch own()"
    )
    assert (failed.error, failed.message) == ("ConfigError", "mine")
    assert "rank" in failed.traceback
    assert "raise ConfigError('mine')" in failed.traceback
    assert kernel.complete("%launch --mi") == ["--mixed-precision"]
    assert kernel.complete("%launch -n 2 tra") == ["train"]
    kernel.ok("from notebook_launcher import launch")
    assert "mixed_precision=" in kernel.complete("launch(train, mixed")
