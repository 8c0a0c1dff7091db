"""What each request field says of itself, in a line: for /openapi.json and /docs.

Knows no type and no bound: those come from the checks (field_schemas.py). docs/request-fields.md
has more. Always holds: each honoured field of fields.py has a line, and no other has.
"""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: Mapping[str, Mapping[str, str]] = {
    "What is asked": {
        "model": "The model's name; may be left out, since one is served.",
        "prompt": "A text, texts, token ids, or lists of ids; each is continued.",
        "messages": "The conversation. Content is text or a list of text parts; other keys of a "
        "message go to the model's template.",
        "tokens": "Token ids, taken as they are.",
        "suffix": "What stands behind the text to fill in; for models with marks for that, not "
        "with echo.",
        "echo": "Put the prompt's text in front of each choice.",
        "add_special_tokens": "Put the tokenizer's special tokens (begin of text) around the "
        "prompt; true where it is left out.",
        "truncate_prompt_tokens": "Keep the last so many tokens of a prompt; -1: as many as fit "
        "beside max_tokens.",
    },
    "How long, how many": {
        "max_tokens": "Most tokens of an answer; 16 where it is left out. 0 only where the prompt"
        " is scored. Prompt and answer must fit the context together.",
        "max_completion_tokens": "The newer name of max_tokens; give one.",
        "min_tokens": "No end before so many tokens; at most max_tokens.",
        "n": "Choices a prompt; with several prompts at most 1,024 altogether.",
        "best_of": "Compute so many and return the n best by mean log-probability.",
        "use_beam_search": "Search with best_of (or n) beams and return the n best.",
        "length_penalty": "Of beams: a score is divided by length to this power.",
        "early_stopping": "Of beams: when the search ends, as in transformers.",
    },
    "How tokens are chosen": {
        "seed": "The same request with the same seed gives the same answer; random where left "
        "out, and told in each choice.",
        "temperature": "0 takes the likeliest token; above, chance grows with it.",
        "top_k": "Keep the k likeliest tokens; 0 or -1: all.",
        "top_p": "Keep the likeliest tokens that together have this probability.",
        "min_p": "Drop tokens less probable than this part of the likeliest.",
        "typical_p": "Keep tokens whose surprise is nearest to the expected one; 1: off.",
        "top_n_sigma": "Keep logits within so many standard deviations of the largest; 0 or -1: "
        "off.",
        "epsilon_cutoff": "Drop tokens below this probability; 0: off.",
        "eta_cutoff": "The same, less of them where much is open; 0: off.",
        "xtc_probability": "With this probability, leave out the likeliest tokens above "
        "xtc_threshold but the last of them; 0: off.",
        "xtc_threshold": "See xtc_probability.",
        "mirostat": "2: keep surprise at mirostat_tau, in place of the filters; 0: off.",
        "mirostat_tau": "Surprise to keep, in bits.",
        "mirostat_eta": "How fast mirostat corrects itself.",
        "repetition_penalty": "Divide logits of tokens in prompt and answer by this.",
        "presence_penalty": "Taken once from logits of tokens in the answer.",
        "frequency_penalty": "Taken as often as the token is in the answer.",
        "dry_multiplier": "Strength of the penalty on going on with a repeat; 0: off.",
        "dry_base": "How the penalty grows with the repeat's length.",
        "dry_allowed_length": "Repeats up to this length are free.",
        "dry_penalty_last_n": "Look at so many last tokens for repeats; -1: all.",
        "dry_sequence_breakers": "No repeat is seen across these.",
        "no_repeat_ngram_size": "No so many tokens in a row twice; 0: off.",
        "logit_bias": "Added to the logits of these token ids.",
        "bad_words": "Never finish one of these.",
        "allowed_token_ids": "Choose nothing but these.",
    },
    "Where an answer ends, and what is told of it": {
        "stop": "End before one of these strings.",
        "stop_token_ids": "End with one of these tokens.",
        "include_stop_str_in_output": "Keep the stop string in the answer.",
        "ignore_eos": "Go on behind the end-of-text token.",
        "skip_special_tokens": "Special tokens have no text in the answer; true where left out.",
        "logprobs": "Tell each token's log-probability and so many alternatives.",
        "top_logprobs": "So many alternatives a token; with logprobs: true.",
        "prompt_logprobs": "Tell the prompt's log-probabilities and so many alternatives.",
        "logprob_token_ids": "With logprobs: tell those of exactly these ids too.",
        "return_token_strs": "Tell each token's text too.",
        "return_token_ids": "Tell the ids of the prompt and of each answer's tokens.",
        "return_timings": "Tell in usage how long the request waited and ran.",
        "timings": "Return counts, times and rates beside usage, in the form of llama.cpp.",
        "timings_per_token": "Return those in every chunk too.",
        "return_progress": "While streaming, send events of how much of the prompt is computed.",
        "return_cached_tokens_details": "Tell in usage where cached tokens were found.",
    },
    "What an answer may be": {
        "response_format": "The answer is free text, any JSON object, JSON of a schema, or free "
        "text with parts that follow schemas.",
        "structured_outputs": "The answer follows a JSON schema, a regular expression, a choice "
        "of texts, a grammar (Lark or GBNF) or a structural tag.",
    },
    "Tools, reasoning, templates": {
        "tools": "Functions the model may call.",
        "tool_choice": "Whether it may call, must, and which.",
        "parallel_tool_calls": "Whether it may make several calls in one answer.",
        "reasoning_effort": "How much the model reasons, where its template knows degrees.",
        "include_reasoning": "Tell the reasoning in the answer.",
        "add_generation_prompt": "Open the model's answer at the end of the prompt.",
        "continue_final_message": "Go on with the last message.",
        "chat_template": "The name of one of the model's templates; a template's text only where "
        "the server trusts its callers.",
        "chat_template_kwargs": "Variables for the template; one it does not read is refused.",
        "documents": "Documents for the template.",
    },
    "How it is served": {
        "stream": "Send the answer as server-sent events while it is made.",
        "stream_options": "include_usage: one more chunk with the usage. "
        "continuous_usage_stats: the usage so far in every chunk. resumable: the stream "
        "can go on after a break.",
        "cache_salt": "Share cached prefixes only with requests of the same salt.",
        "priority": "Lower is served earlier, under a policy that reads it.",
        "deadline_ms": "When the whole answer should be there; refused where it cannot be.",
        "ttft_slo_ms": "When the first token should be there; refused where it cannot be.",
        "tpot_slo_ms": "The longest mean time between tokens.",
    },
}
WORDS = {name: line for group in GROUPS.values() for name, line in group.items()}

# Where chats differ.
OF_CHATS: Mapping[str, str] = {
    "max_tokens": "Most tokens of an answer; the rest of the context where it is left out. 0 only"
    " where the prompt is scored.",
    "logprobs": "Tell each token's log-probability.",
    "n": "Choices.",
    "add_special_tokens": "Put the tokenizer's special tokens around what the template wrote; "
    "false where it is left out.",
}

# Where /tokenize, /detokenize and /apply_template differ.
OF_TEXTS: Mapping[str, str] = {
    "prompt": "The text; or give messages.",
    "messages": "The conversation, rendered by the model's template.",
    "add_special_tokens": "Put the tokenizer's special tokens around the text; true for a prompt,"
    " false for messages, where it is left out.",
    "skip_special_tokens": "Leave special tokens out of the text; false where it is left out.",
}
