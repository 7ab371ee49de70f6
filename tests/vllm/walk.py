"""A walk of random steps of one engine: what requests may do to each other, and what happens to a store."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.vllm.lockstep import Lockstep
from tests.vllm.stored import Stored

SALTS = ("a", "b")


class Walk:
    """`options`: those of `Lockstep`."""

    def __init__(self, config: Any, folder: Path, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        self.engine = Lockstep(config, folder, **options)
        self.engine.looks = lambda: self.random.random() < 0.7
        self.stored = Stored(folder, self.engine.right, SALTS)
        self.texts = [[self.random.randrange(3) for _ in range(40)] for _ in range(3)]

    def go(self, steps: int) -> None:
        """And compare what is stored now and then."""
        for number in range(steps):
            self.step()
            if number % 20 == 19:
                self.engine.flush()
                self.stored.check()
        self.engine.finish()
        self.stored.check()
        self.check_answers()
        self.engine.close()

    def step(self) -> None:
        """Something that may happen at any time, and then the engine's next step."""
        engine, chance = self.engine, self.random.random()
        alive = [name for name, one in engine.all.items() if not one.is_finished()]
        if chance < 0.35 and len(alive) < 8:
            salt = self.random.choice([None, None, None, *SALTS])
            own = {"priority": self.random.randrange(3), "anew": self.random.random() < 0.1}
            engine.add(self.prompt(), self.random.randint(1, 14), salt, **own)
        elif chance < 0.42 and alive:
            engine.abort(self.random.choice(alive))
        elif chance < 0.47:
            self.damage()
        elif chance < 0.50:
            engine.forget_prefixes()
        elif chance < 0.53 and len(alive) < len(engine.all):
            done = self.random.choice([one for one in engine.all.values() if one.is_finished()])
            self.texts[self.random.randrange(3)] = list(done.all_token_ids)[:60]
        engine.step()
        if self.random.random() < 0.8:
            engine.flush()

    def prompt(self) -> list[int]:
        """The front of one of few texts, some of them conversations, and a little more."""
        text = self.random.choice(self.texts)
        more = [self.random.randrange(3) for _ in range(self.random.randrange(3))]
        return text[: self.random.randint(1, len(text))] + more

    def damage(self) -> None:
        """Some blocks, each of one rank."""
        self.engine.flush()
        self.stored.check()
        files = [path for path in self.stored.files() if path not in self.stored.damaged]
        for path in self.random.sample(files, min(len(files), 3)):
            self.stored.damage(path)

    def check_answers(self) -> None:
        """What was answered is what an engine without a store answers."""
        for name, one in self.engine.all.items():
            answered = list(one.output_token_ids)
            right = self.engine.right.continued(
                one.cache_salt, list(one.prompt_token_ids), len(answered)
            )
            assert answered == right, f"{name} was answered wrong"
