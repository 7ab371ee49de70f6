"""A prompt that one machine computed, on another one.

python samples/shared_prompt.py model.gguf s3://team-kv/prod   (or file:///mnt/kv)

Run it on two machines, or twice with another KVSNAP_STORE: the second finds the prompt's blocks in
the remote, and computes next to nothing.
"""

import sys

import llama_cpp

import kvsnap

llm = llama_cpp.Llama(sys.argv[1], n_ctx=1024, verbose=False)
engine = kvsnap.engines.LlamaCpp(llm)
prompt = llm.tokenize(b"A bicycle rental keeps its bicycles in two halls. " * 20)

# remote: what is missing in the local store is looked for there; a remote that is down costs one
# timeout. write_behind: what is saved here goes there, too, in a thread.
with kvsnap.Store(remote=sys.argv[2], write_behind=True) as store:
    session = kvsnap.Session(store, engine, "rental/rules")
    report = session.resume(prompt)
    print("reused:", report.reused_tokens, "of", report.prompt_tokens)
    for line in report.damage:
        print("  but:", line)
    llm.eval(prompt[report.reused_tokens :])
    session.save()
    try:
        store.flush()  # waits until the session is in the remote; closing the store does, too
        print("in the remote:", sys.argv[2])
    except kvsnap.KvsnapError as error:  # nothing is lost: it is saved here
        print("not in the remote:", error.what, "|", error.hint)
