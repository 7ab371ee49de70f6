"""What a resume and a save did, in numbers that add up: reused + computed = prompt tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.formats.identity import EXACT


@dataclass(frozen=True, kw_only=True)
class ResumeReport:
    """`reused_tokens` are in the engine now; the caller computes the rest."""

    prompt_tokens: int
    reused_tokens: int
    from_store: int
    """Of the reused tokens, how many came from the store; the engine held the others already."""
    stopped_by: str
    """Why reuse ended where it did; one line."""
    fidelity: str = EXACT
    """Of the rows that the engine holds now: not `exact` where lossy ones are among them."""
    damage: tuple[str, ...] = ()
    """One line for each stored block or session that could not be used."""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reused_tokens


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """`bytes_raw` are the written rows as the engine had them."""

    session: str | None
    revision: int
    tokens: int
    blocks: int
    blocks_stored: int
    """Of the chain's blocks; fewer than `blocks` only where the store was full."""
    blocks_written: int
    states_written: int = 0
    """State checkpoints, of models that need some; their bytes count among those written."""
    bytes_written: int
    bytes_raw: int
    codec: str
    fidelity: str
