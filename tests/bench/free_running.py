"""Greedy text of llama.cpp on restored rows, exact against each codec.

.venv/bin/python tests/bench/free_running.py [--codec ID ...] [--calibration STORE]

64 greedy tokens after 1,536 tokens of each text of samples/texts, and answers to questions about a
system prompt. A session is saved by each codec and resumed in a new context, as users do it. Greedy
text parts for good at its first different token, so it is told where that is, and how many of the
questions are still answered with the fact that the prompt holds.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvsnap.cli.bundled import bundled_model
from kvsnap.engines import LlamaCpp
from kvsnap.engines.llamacpp_load import LoadOptions, load_llama
from kvsnap.formats.names import TokenIds, common_prefix, token_array
from kvsnap.kvstore.session import Session
from kvsnap.kvstore.store import Store

SAMPLES = Path(__file__).parents[2] / "samples"
CONTEXT, NEW = 1536, 64
FACTS = """The library of Ostwick opens at nine in the morning and closes at six in the evening. It is
closed on Mondays. A card costs twelve euros a year. Books may be kept for three weeks, films for one
week. The librarian is called Marta Lindqvist. The reading room is on the second floor. Dogs are not
allowed, but the cat of the house is called Pepper. A lost card costs five euros. The oldest book is
a herbal of 1561. The phone number is 555 0142. """
QUESTIONS = {
    "On which day is the library closed?": "monday",
    "How much does a card cost a year?": "twelve",
    "What is the name of the librarian?": "marta",
    "What is the cat called?": "pepper",
    "On which floor is the reading room?": "second",
    "From which year is the oldest book?": "1561",
    "For how long may films be kept?": "one week",
    "What is the phone number?": "0142",
}


@contextmanager
def engine(model: Path) -> Iterator[LlamaCpp]:
    llm = load_llama(model, LoadOptions(), 2048)
    try:
        yield LlamaCpp(llm)
    finally:
        llm.close()


def continued(store: Store, own: LlamaCpp, ids: TokenIds, codec: str) -> list[int]:
    """64 greedy tokens after a prompt whose rows are restored from blocks of this codec."""
    session = Session(store, own, codec=codec, allow_lossy=False)
    own.truncate(0)
    report = session.resume(ids)
    assert report.reused_tokens >= len(ids) - store.block_size, report
    own.evaluate(ids[report.reused_tokens :])
    tokens = own.generate(ids, temperature=0.0, seed=0)
    return [token for token, _ in zip(tokens, range(NEW), strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codec", action="append")
    parser.add_argument("--calibration", type=Path, help="a store that has the model's, for kvtc")
    arguments = parser.parse_args()
    codecs = arguments.codec or ["raw", "q8", "q4"]
    model = bundled_model()
    with tempfile.TemporaryDirectory() as folder, engine(model) as own:
        stores = {codec: Store(Path(folder) / str(n)) for n, codec in enumerate(codecs)}
        if arguments.calibration:
            for store in stores.values():
                shutil.copytree(arguments.calibration / "calibrations", store.place.calibrations)
        prompts = {
            path.stem: own.tokenize(path.read_text("utf-8"), first=True)[:CONTEXT]
            for path in sorted((SAMPLES / "texts").glob("*.txt"))
        }
        asked = {}
        for question in QUESTIONS:
            messages = [
                {"role": "system", "content": FACTS * 3},
                {"role": "user", "content": question},
            ]
            asked[question] = own.tokenize(own.render(messages, answer=True), first=True, chat=True)
        for ids in [*prompts.values(), *asked.values()]:
            own.truncate(0)
            own.evaluate(ids)
            own.marks = ()
            for codec, store in stores.items():
                Session(store, own, codec=codec).put_filled()
        texts: dict[str, dict[str, list[int]]] = {}
        for codec, store in stores.items():
            texts[codec] = {
                name: continued(store, own, token_array(ids), codec)
                for name, ids in {**prompts, **asked}.items()
            }
        print(f"{'codec':12} {'equal greedy tokens of ' + str(NEW):40} answers right")
        for codec, found in texts.items():
            equal = {
                name: common_prefix(token_array(texts[codecs[0]][name]), token_array(found[name]))
                for name in prompts
            }
            right = sum(
                fact in own.detokenize(found[question]).decode("utf-8", "replace").lower()
                for question, fact in QUESTIONS.items()
            )
            told = ", ".join(f"{name} {number}" for name, number in equal.items())
            print(f"{codec:12} {told:40} {right} of {len(QUESTIONS)}")


if __name__ == "__main__":
    main()
