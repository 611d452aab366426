"""Which live bytes to plan for next, so that a plan fits when placed and costs little.

Where values come to lie takes more than their bytes, by how much only a plan tells. Each round solves for a target and says
what came of it. As long as the cheapest plan of the target takes more than wanted, the next target is as much lower; once
one fits, it is half way back up to the lowest that did not; and where there was no plan at all, half way up to what had one.
"""

import dataclasses

_MOST_RAISES = 1                # when nothing is found, before the limit itself


@dataclasses.dataclass
class Targets:
    """limit_bytes: the highest target; least_bytes: by how much targets change at least."""

    limit_bytes: int
    now: int
    least_bytes: int
    _too_low: int = 0
    _fits: int | None = None
    _takes_more: int | None = None
    _rounds: int = 0

    def no_plan(self) -> bool:
        """There is no plan for the target. False where there is nothing left to try."""
        self._rounds += 1
        self._too_low = self.now
        if self.now >= self.limit_bytes:
            return False
        return self._move(self.now)

    def placed(self, peak_bytes: int, over_bytes: int) -> bool:
        """The plan for the target has this peak alive, and takes so much more than wanted when placed (less where negative).
        False where no other target promises more."""
        self._rounds += 1
        if peak_bytes <= self._too_low:         # the search for that one was just too short
            self._too_low = 0
        if over_bytes <= 0:
            self._fits = max(self.now, self._fits or 0)
        else:
            self._takes_more = min(self.now, peak_bytes, self._takes_more or self.now)
        if self._fits is None:
            return self._move(self._takes_more - max(over_bytes, self.least_bytes))
        if self._takes_more is None or self._takes_more - self._fits < 2 * self.least_bytes:
            return False
        self.now = (self._fits + self._takes_more) // 2
        return True

    def _move(self, target: int) -> bool:
        if target <= self._too_low:             # somewhere between what has no plan and what has one, with another seed
            highest = self._takes_more or self.limit_bytes
            is_last = self._takes_more is None and self._rounds > _MOST_RAISES
            target = highest if is_last else (self._too_low + highest + 1) // 2
        self.now = target
        return True
