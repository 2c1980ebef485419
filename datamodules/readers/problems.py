"""Faults of a user's files → one error that names all of them."""

from __future__ import annotations


class Problems:
    """Collects faults by kind, so that one error can name all of them with a count and examples."""

    def __init__(self) -> None:
        self._examples: dict[str, list[str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, rule: str, example: object = None) -> None:
        """Note one fault.

        Args:
            rule: file, key, what must hold and what to do; faults of one rule are counted together.
            example: the value that breaks it.
        """
        self._counts[rule] = self._counts.get(rule, 0) + 1
        examples = self._examples.setdefault(rule, [])
        if example is not None and len(examples) < 3:
            examples.append(str(example))

    def raise_if_any(self, what: str) -> None:
        """Raise one ValueError that lists everything that was noted."""
        if not self._counts:
            return
        lines = [f"{what}: {len(self._counts)} problem{'s' if len(self._counts) > 1 else ''}"]
        for rule, count in self._counts.items():
            examples = ", ".join(self._examples[rule])
            told = f" [{count:,}×, e.g. {examples}]" if examples else ""
            lines.append(f"- {rule}{told}")
        raise ValueError("\n".join(lines))
