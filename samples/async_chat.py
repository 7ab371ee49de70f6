"""Several chats on one model in an asyncio program: the loop is never blocked, no turn meets another.

python samples/async_chat.py model.gguf; the second run goes on where the first one ended.
"""

import asyncio
import sys

import llama_cpp

import kvsnap
from kvsnap.kvstore.answer import Answer, generate, prefill
from kvsnap.kvstore.conversation import Source, answered, new_prompt, next_prompt


def turn(session: kvsnap.Session, engine: kvsnap.engines.LlamaCpp, text: str) -> tuple[str, int]:
    """One turn, in a thread: what the model answers, and how many tokens were reused."""
    source = Source(messages=[{"role": "user", "content": text}])
    if session.stored is not None:
        prompt = next_prompt(engine, session.stored.record, source)
    else:
        prompt = new_prompt(engine, source, answer=True)
    result = Answer()
    prefill(session, engine, prompt.token_ids, result)
    for _ in generate(engine, prompt.token_ids, result, max_tokens=16):
        pass
    after = answered(prompt, engine, result.new_ids, result.ended)
    session.save_soon(after.notes("model"))  # the next turn need not wait for the disk
    return after.messages[-1]["content"], len(prompt.token_ids) - result.computed_tokens


async def main() -> None:
    llm = llama_cpp.Llama(sys.argv[1], n_ctx=1024, verbose=False)
    engine, one_turn = kvsnap.engines.LlamaCpp(llm), asyncio.Lock()

    async def chat(name: str, *texts: str) -> None:
        with kvsnap.Session(store, engine, name) as session:
            for text in texts:
                async with one_turn:  # between resume and save the engine is this chat's
                    answer, reused = await asyncio.to_thread(turn, session, engine, text)
                print(f"{name}: {answer!r} ({reused} tokens reused)")
                await asyncio.to_thread(session.flush)  # raises what went wrong

    with kvsnap.Store() as store:
        await asyncio.gather(
            chat("alice", "Hello, I am Alice.", "What is my name?"),
            chat("bob", "Hello, I am Bob.", "What is my name?"),
        )


if __name__ == "__main__":
    asyncio.run(main())
