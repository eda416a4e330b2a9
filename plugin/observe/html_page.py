"""Self-contained HTML pages: styles, scripts and data inline, nothing fetched."""

from __future__ import annotations

import contextlib
import html
import json
import math
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from plugin.errors import ConfigError
from plugin.observe.run_record import steps_text

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<main>
<header><div><h1>{title}</h1><div class="soft">{subtitle}</div></div></header>
</main>
<script type="application/json" id="data">{data}</script>
<script>
{script}
</script>
</body>
</html>
"""


def page(title: str, subtitle: str, data: Mapping[str, Any], script: str) -> str:
    """The text of a page that shows `data` with `script` (a file in plugin/observe/page)."""
    encoded = json.dumps(_finite(data), allow_nan=False, separators=(",", ":"))
    texts = {
        name: (files("plugin.observe") / "page" / name).read_text(encoding="utf-8")
        for name in ("style.css", "charts.js", script)
    }
    return _TEMPLATE.format(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        style=texts["style.css"],
        # `<` would let a value end the script element it is stored in.
        data=encoded.replace("<", "\\u003c"),
        script=texts["charts.js"] + "\n" + texts[script],
    )


def series(run: int, label: str, x: list[Any], y: list[Any], **more: Any) -> dict[str, Any]:
    """One line of a chart, as page/charts.js draws it; `run` is also its color."""
    return {"run": run, "label": label, "color": f"c{run % 8}", "x": x, "y": y, **more}


def located(finding: Mapping[str, Any], run_name: str = "") -> dict[str, Any]:
    """A finding with the step or steps at which it was made."""
    when = steps_text(finding)
    return {**finding, "where": f"{run_name}, {when}" if run_name else when}


def write_page(path: Path, text: str, *, force: bool) -> Path:
    """Write a file that a user asked for.

    An existing one is replaced only with `force`, and never left half written.
    """
    refuse_overwriting(path, force)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written ({error}); choose another file") from error
    return path


def refuse_overwriting(path: Path, force: bool) -> None:
    """Raise a `ConfigError` if `path` cannot be written, or exists without the user's --force."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists; add --force to replace it or choose another file")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; choose a file")
    place = path.absolute().parent
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise ConfigError(
            f"{path} cannot be written: {place} is no directory that you may write to; create it, "
            "or choose another file"
        )


def _finite(value: Any) -> Any:
    """The same data with null for what JSON cannot hold, floats at 6 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
