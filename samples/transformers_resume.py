"""transformers with its KV cache on disk: run it twice, the second run reuses the first one's work.

python samples/transformers_resume.py MODEL_FOLDER
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import kvsnap
from kvsnap.engines.transformers import load, save

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
prompt = tokenizer("A bicycle rental keeps its bicycles " * 20, return_tensors="pt").input_ids

with kvsnap.Store() as store:  # KVSNAP_STORE, or the user's cache folder
    cache, reused = load(store, model, prompt)
    print(reused, "of", prompt.shape[1], "tokens reused")
    # Older releases of transformers call the argument past_key_values.
    output = model.generate(prompt, cache=cache, max_new_tokens=16, do_sample=False)
    print(tokenizer.decode(output[0, prompt.shape[1] :]))
    saved = save(store, model, cache, output)
    print(saved.blocks_written, "of", saved.blocks, "blocks written")
