"""Every call of a session, on a model of yours.

python samples/library.py model.gguf
"""

import sys

import llama_cpp

import kvsnap

llm = llama_cpp.Llama(sys.argv[1], n_ctx=1024, verbose=False)
store = kvsnap.Store()  # KVSNAP_STORE, or the user's cache folder
engine = kvsnap.engines.LlamaCpp(llm)
rules = llm.tokenize(b"A bicycle rental keeps its bicycles in two halls. " * 10)

with kvsnap.Session(store, engine, "rental") as session:
    # resume: the longest stored prefix is in the engine now; the rest is yours to compute.
    report = session.resume(rules)
    llm.eval(rules[report.reused_tokens :])
    print("resume:", report.reused_tokens, "reused,", report.computed_tokens, "computed")

    # save: what the engine holds; when this returns it survives a power cut.
    saved = session.save({"about": "the rules"})
    print("save:", saved.tokens, "tokens,", saved.blocks_written, "blocks written")

    # save_soon, flush: the engine goes on while a thread writes; flush says how it went.
    llm.eval(llm.tokenize(b" The halls are open", add_bos=False))
    session.save_soon()
    llm.eval(llm.tokenize(b" every day", add_bos=False))
    flushed = session.flush()
    print("flush:", flushed.tokens if flushed else 0, "tokens are safe")

    # truncate: back to an earlier token, in the engine and in what is saved next.
    session.truncate(len(rules))
    print("truncate:", session.save().tokens, "tokens")

    # branch: a new session from any token on. Nothing is computed, no block is written, and no
    # session is overwritten: the second run of this program is told so.
    try:
        with session.branch("rental/winter", len(rules) - 20, notes={"about": "a branch"}) as fork:
            print("branch:", len(fork.stored_token_ids()), "tokens")
    except kvsnap.KvsnapError as error:  # one line what, one line what to do
        print("branch:", error.what, "|", error.hint)

    # An edit is a resume with other tokens: what is before the change is reused.
    edited = [*rules[:70], *llm.tokenize(b" They are closed on Sundays.", add_bos=False)]
    report = session.resume(edited)
    print("edit:", report.reused_tokens, "of", len(edited), "reused:", report.stopped_by)

store.close()
