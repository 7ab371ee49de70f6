"""A chat that survives `kill -9`: python samples/chat.py model.gguf; /help lists the commands."""

import argparse
import codecs
from contextlib import closing
from pathlib import Path

import llama_cpp

import kvsnap
from kvsnap.formats.session import SessionRecord
from kvsnap.kvstore import conversation as talk
from kvsnap.kvstore.answer import Answer, generate, prefill
from kvsnap.kvstore.boundaries import boundaries

HELP = """\
/list               the conversations, with their tokens
/open NAME          go on with another conversation, or begin one
/branch NAME [N]    a new conversation from the first N messages of this one (all of them)
/edit TEXT          say something else in place of the last message, and let it be answered
/quit               or Ctrl-D; Ctrl-C ends an answer"""


class Chat:
    """One conversation at a time, on one model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.store = options, kvsnap.Store()
        llm = llama_cpp.Llama(str(options.model), n_ctx=options.ctx, verbose=False)
        self.engine = kvsnap.engines.LlamaCpp(llm)
        self.session = kvsnap.Session(self.store, self.engine)
        self.do(f"/open {options.session}")

    def ask(self) -> str:
        try:
            return input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            return "/quit"

    def do(self, line: str) -> None:
        try:
            (self.command if line.startswith("/") else self.say)(line) if line else None
        except KeyboardInterrupt:
            print("[stopped]")
        except (kvsnap.KvsnapError, OSError, ValueError) as error:
            print(f"[{error}]")

    def open(self, name: str) -> None:
        self.session = kvsnap.Session(self.store, self.engine, name)
        record = self.record()
        messages = talk.stored_chat(record).messages if record else ()  # raises where it is no chat
        tokens = len(record.token_ids) if record else 0
        print(f"[{name}: {len(messages)} messages, {tokens} tokens]")
        if record and messages and messages[-1]["role"] == "user":  # killed before it was answered
            last = len(messages) - 1
            self.answer(talk.edited_prompt(self.engine, record, last, messages[last]["content"]))

    def record(self) -> SessionRecord | None:
        """What is stored, once the last save is done."""
        try:
            self.session.flush()
        except kvsnap.KvsnapError as error:
            print(f"[{error.what}; {error.hint}]")
        return self.session.stored.record if self.session.stored else None

    def save(self, prompt: talk.Prompt, prefill: list[float]) -> None:
        """In the background; the next save, the next turn or the end waits for it."""
        self.record()
        self.session.save_soon({**prompt.notes(self.options.model.name), "prefill": prefill})

    def say(self, text: str) -> None:
        record, system = self.record(), self.options.system
        if record is not None:
            return self.answer(talk.next_prompt(self.engine, record, talk.Source(text=text)))
        first = [{"role": "system", "content": system.read_text()}] if system else []
        source = talk.Source(messages=[*first, {"role": "user", "content": text}])
        return self.answer(talk.new_prompt(self.engine, source, answer=True))

    def answer(self, prompt: talk.Prompt) -> None:
        """Restore, compute the rest, save, stream an answer, save again."""
        engine, ids, result = self.engine, prompt.token_ids, Answer()
        if prompt.warning:
            print(f"[{prompt.warning}]")
        places = boundaries(engine, prompt) if engine.layout.needs_state else []
        report = prefill(self.session, engine, ids, result, store_on_the_way=True, places=places)
        record = self.record()
        # The longest prefill so far tells best how long this model takes for a token.
        known = record.notes.get("prefill") if record else None
        longest = max(known or [1, 0.0], [result.computed_tokens, result.seconds.prefill])
        self.save(prompt, longest)  # a kill from here on loses the answer, not the question
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tokens = generate(engine, ids, result, max_tokens=self.options.max_tokens)
        try:
            with closing(tokens):
                for token in tokens:
                    print(decoder.decode(engine.detokenize([token])), end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        self.save(talk.answered(prompt, engine, result.new_ids, result.ended), longest)
        saved = report.from_store * longest[1] / longest[0] - result.seconds.restore
        print(
            f"\n[{len(ids) - result.computed_tokens} of {len(ids)} tokens reused,"
            f" {report.from_store} of them from the store: {max(0.0, saved):.1f} s saved,"
            f" {result.seconds.first_token or 0:.2f} s waited]"
        )

    def command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        record = self.record()
        if word == "/list":
            for item in self.store.listing:
                print(f"{item.facts.tokens:8} tokens  {item.facts.name}")
        elif word == "/open" and rest:
            self.session.close()
            self.open(rest)
        elif word == "/branch" and rest and record:
            name, _, count = rest.partition(" ")
            count = count or str(len(talk.stored_chat(record).messages))
            front = talk.branch_prompt(self.engine, record, int(count))
            notes = {**record.notes, **front.notes(self.options.model.name)}
            self.session.branch(name, len(front.token_ids), notes=notes)
            self.session.close()
            self.open(name)
        elif word == "/edit" and rest and record:
            roles = [message["role"] for message in talk.stored_chat(record).messages]
            last = max((n for n, role in enumerate(roles) if role == "user"), default=-1)
            self.answer(talk.edited_prompt(self.engine, record, last, rest))
        else:
            print(HELP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--session", default="chat")
    parser.add_argument("--system", type=Path, help="a file with the system prompt")
    parser.add_argument("--ctx", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=256)
    chat = Chat(parser.parse_args())
    while (line := chat.ask()) != "/quit":
        chat.do(line)
    chat.record()
    chat.session.close()
    chat.store.close()


if __name__ == "__main__":
    main()
