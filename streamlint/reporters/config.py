"""The effective configuration as TOML, with where each value comes from."""

from __future__ import annotations

import textwrap

from streamlint.config import Config
from streamlint.suppression import MATCHERS
from streamlint.units import ns_text, share_text


def render(config: Config) -> str:
    """A `streamlint.toml` that says the same as ``config`` and the defaults."""
    file = f"Configuration: {config.origin}" if config.path else "No configuration file"
    saving = config.min_saving
    least = "0ns" if saving.ns is None else ns_text(saving.ns)
    least = least if saving.share is None else share_text(saving.share)
    lines = [
        f"# {file}",
        _line(config, "select", _list(config.select), "[]: every rule"),
        _line(config, "ignore", _list(config.ignore)),
        _line(config, "fail-on", _text(config.fail_on.value)),
        _line(config, "min-saving", _text(least)),
        _line(
            config,
            "baseline-tolerance",
            _text(f"{100 * config.baseline_tolerance:.6g}%"),
        ),
    ]
    lines.append(_line(config, "replay", str(config.replay).lower()))
    lines.append(_line(config, "steady-state", str(config.scope.steady_state).lower()))
    if config.scope.steady_nvtx is not None:
        pattern = _text(config.scope.steady_nvtx)
        lines.append(_line(config, "steady-state-nvtx", pattern))
    else:
        lines.append(
            "# steady-state-nvtx isn't set: iterations are found by themselves"
        )
    folders = tuple(str(path) for path in config.rules_dir)
    lines.append(_line(config, "rules-dir", _list(folders)))
    if config.path_map:
        lines += ["", "[path-map]"]
    for old, new in config.path_map:
        lines.append(f"{_text(old)} = {_text(new)}  # {config.origin}")
    for rule in config.catalog.rules:
        if rule.thresholds:
            lines += ["", f"[rules.{rule.name}]"]
        for threshold in rule.thresholds:
            lines += textwrap.wrap(
                threshold.origin,
                79,
                initial_indent="# ",
                subsequent_indent="# ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            value = config.limits.get(threshold, threshold.default)
            key = f"rules.{rule.name}.{threshold.name}"
            default = threshold.text(threshold.default)
            notes = [f"default {default}"] if key in config.given else []
            notes += [threshold.counted] if threshold.counted else []
            lines.append(_line(config, key, threshold.text(value), *notes))
    for allowance in config.allowances:
        lines += ["", f"[[allow]]  # {config.origin}"]
        lines.append(f"rule = {_text(allowance.rule)}")
        lines.append(f"reason = {_text(allowance.reason)}")
        lines += [f"until = {allowance.until}"] if allowance.until else []
        for matcher in MATCHERS:
            patterns = getattr(allowance, matcher)
            lines += [f"{matcher} = {_list(patterns)}"] if patterns else []
    return "".join(f"{line}\n" for line in lines)


def _line(config: Config, key: str, value: str, *notes: str) -> str:
    origin = config.origin if key in config.given else "default"
    about = "; ".join((origin, *notes))
    return f"{key.rpartition('.')[2]} = {value}  # {about}"


def _list(values: tuple[str, ...]) -> str:
    return f"[{', '.join(map(_text, values))}]"


def _text(value: str) -> str:
    """A TOML string."""
    escaped = (
        c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value
    )
    return f'"{"".join(escaped)}"'
