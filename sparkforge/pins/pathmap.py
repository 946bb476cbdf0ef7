"""The paths of the repository's files in the release wheel, and the way back."""

from __future__ import annotations

from collections.abc import Iterable

from sparkforge.pins.types import Model, Place


class PathRule(Model):
    """The folder of the release wheel for files of the repository."""

    repo: Place
    """Prefix in the repository, with its trailing slash; with ``build`` also a file."""
    wheel: Place | None
    """Prefix in the wheel; null: files that no wheel contains or needs (tests, docs)."""
    build: bool = False
    """Build rules: a change of them affects a compile only, never an overlay."""


def rule_of(rules: Iterable[PathRule], path: str) -> PathRule | None:
    """Return the longest rule that matches a path of the repository, or None."""
    fitting = [
        rule
        for rule in rules
        if path == rule.repo or (rule.repo.endswith("/") and path.startswith(rule.repo))
    ]
    return max(fitting, key=lambda rule: len(rule.repo), default=None)


def member_of(rules: Iterable[PathRule], path: str) -> str | None:
    """Return the path in a wheel of a file of the repository; None: not in a wheel, or no rule."""
    rule = rule_of(rules, path)
    if rule is None or rule.wheel is None:
        return None
    return rule.wheel + path[len(rule.repo) :]


def origin_of(rules: Iterable[PathRule], member: str) -> tuple[PathRule, str] | None:
    """Return the origin of a wheel's member: the longest rule and the path; None: no rule."""
    fitting = [(rule.wheel, rule) for rule in rules if rule.wheel and member.startswith(rule.wheel)]
    if not fitting:
        return None
    prefix, rule = max(fitting, key=lambda pair: len(pair[0]))
    return rule, rule.repo + member[len(prefix) :]
