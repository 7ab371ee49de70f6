"""llama-cpp-python with a cache on disk: run it twice, the second run reuses the first one's work.

python samples/llama_cpp_drop_in.py model.gguf
"""

import sys

import llama_cpp

import kvsnap

llm = llama_cpp.Llama(sys.argv[1], n_ctx=2048, verbose=False)
store = kvsnap.Store()  # KVSNAP_STORE, or the user's cache folder
cache = kvsnap.LlamaCache(store, llm)
llm.set_cache(cache)

rules = "You help the customers of a bicycle rental. " * 20
messages = [{"role": "system", "content": rules}, {"role": "user", "content": "Hello!"}]
answer = llm.create_chat_completion(messages, max_tokens=16, temperature=0.0)
print(answer["choices"][0]["message"]["content"])
print(cache.report.reused_tokens, "of", cache.report.prompt_tokens, "prompt tokens reused")
store.close()
