"""One line of description for each request field, for /openapi.json and /docs.

Types and bounds come from the checks (field_schemas.py). docs/request-fields.md has more. Always
holds: each field that a route honours has a line, and no other field has.
"""

from __future__ import annotations

from collections.abc import Mapping

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Prompt": {
        "model": "The model's name; optional, since one model is served.",
        "prompt": "A text, texts, token ids, or lists of ids; each is continued.",
        "messages": "The conversation. Content is text or a list of text parts; other keys of a "
        "message go to the model's template.",
        "tokens": "Token ids, used unchanged.",
        "system": "Instructions before the conversation: a text, or a list of text blocks.",
        "input": "A text, or the items of a conversation: messages, function_call, "
        "function_call_output, reasoning, item_reference.",
        "previous_response_id": "Continue the conversation of this stored response.",
        "conversation": "Continue this conversation (POST /v1/conversations), and add to it.",
        "instructions": "A system message before the input.",
        "truncation": "auto: leave out the oldest items if all do not fit the context; disabled: "
        "refuse the request.",
        "context": "The context of an earlier answer, which the prompt continues.",
        "content": "The text, in the form of llama.cpp's API: no special tokens by default.",
        "input_prefix": "The text before the gap to fill in.",
        "input_suffix": "The text after the gap to fill in.",
        "input_extra": "Texts of other files, which precede the prompt; the first are left out if "
        "all do not fit the context.",
        "raw": "Use the prompt as it is, without the model's template.",
        "template": "Not served: templates of Ollama are written in Go's language.",
        "images": "Not served: the model reads text only.",
        "name": "The older name of model.",
        "suffix": "The text after the gap to fill in; for models with infill tokens, not with "
        "echo.",
        "echo": "Prepend the prompt's text to each choice.",
        "add_special_tokens": "Add the tokenizer's special tokens (begin of text) to the prompt; "
        "true by default.",
        "query": "The text that documents are compared with.",
        "text_1": "A text, or as many as text_2: the queries of the pairs.",
        "text_2": "A text or texts: the documents of the pairs.",
        **dict.fromkeys(("data_1", "queries"), "Another name of text_1."),
        **dict.fromkeys(("data_2", "items"), "Another name of text_2."),
        "max_tokens_per_query": "Cut each query to this many tokens, at its end; 0, the default: "
        "nothing is cut.",
        "max_tokens_per_doc": "Cut each document to this many tokens, at its end; 0, the default: "
        "nothing is cut.",
        "prompt_name": 'The name of one of the model\'s prompts, which precedes each text; "" for '
        "none, the model's default if it is left out.",
        "instruction": "What makes a document relevant; for models that judge (Qwen3-Reranker).",
        "truncate_prompt_tokens": "Keep only the last tokens of a prompt, at most this many; -1: "
        "as many as fit beside max_tokens.",
        "truncation_side": "With truncate_prompt_tokens: left keeps the end of a prompt, right its "
        "beginning.",
    },
    "Length and number of choices": {
        "max_tokens": "Maximum number of tokens of an answer; 16 by default. 0 only if the prompt "
        "is scored. Prompt and answer must fit the context together.",
        "max_completion_tokens": "The newer name of max_tokens; give one.",
        "max_output_tokens": "Maximum number of tokens of the answer; the rest of the context by "
        "default.",
        "n_predict": "Maximum number of tokens of the answer; -1, -2 and by default: the rest of "
        "the context. 0: the prompt is computed, and nothing is generated.",
        "min_tokens": "Minimum number of tokens before the answer may end; at most max_tokens.",
        "n": "Choices for each prompt; with several prompts at most 1,024 in total.",
        "best_of": "Compute this many sequences and return the n best by mean log-probability.",
        "use_beam_search": "Search with best_of (or n) beams and return the n best.",
        "length_penalty": "Beam search: a score is divided by length to this power.",
        "early_stopping": "Beam search: when the search ends, as in transformers.",
    },
    "Sampling": {
        "options": "The sampling parameters: Ollama's names, and those of the fields here.",
        "seed": "The same request with the same seed gives the same answer; random by default, "
        "and returned with each choice.",
        "temperature": "0 selects the most likely token; higher values are more random.",
        "top_k": "Keep the k most likely tokens; 0 or -1: all.",
        "top_p": "Keep the most likely tokens that together have this probability.",
        "min_p": "Drop tokens less probable than this fraction of the most likely one.",
        "typical_p": "Keep tokens with a surprise nearest to the expected one; 1: off.",
        "top_n_sigma": "Keep logits within this many standard deviations of the largest; 0 or -1: "
        "off.",
        "epsilon_cutoff": "Drop tokens below this probability; 0: off.",
        "eta_cutoff": "Like epsilon_cutoff, with a lower bound at high entropy; 0: off.",
        "xtc_probability": "With this probability, drop all but the least likely of the tokens "
        "above xtc_threshold; 0: off.",
        "xtc_threshold": "See xtc_probability.",
        "mirostat": "Its version, 1 or 2: keep the surprise at mirostat_tau, instead of the "
        "filters; 0: off.",
        "mirostat_tau": "Target surprise in bits.",
        "mirostat_eta": "Learning rate of mirostat.",
        "repetition_penalty": "Divide logits of tokens in prompt and answer by this.",
        "repeat_last_n": "All penalties count this many last tokens of prompt and answer; -1: all, "
        "0: none. Without it repetition_penalty counts both, and the others the answer.",
        "presence_penalty": "Subtracted once from logits of tokens in the answer.",
        "frequency_penalty": "Subtracted once for each occurrence of the token in the answer.",
        "dry_multiplier": "Strength of the penalty on continuing a repetition; 0: off.",
        "dry_base": "Growth of the penalty with the length of the repetition.",
        "dry_allowed_length": "Repetitions up to this length have no penalty.",
        "dry_penalty_last_n": "Search this many last tokens for repetitions; -1: all.",
        "dry_sequence_breakers": "Texts that end a repetition.",
        "no_repeat_ngram_size": "No sequence of this many tokens occurs twice; 0: off.",
        "logit_bias": "Added to the logits of these token ids, -100 and 100 too; also a list of "
        "[token id or text, number], with false for a ban.",
        "bad_words": "Never complete one of these texts.",
        "allowed_token_ids": "Sample only these tokens.",
    },
    "End and content of the answer": {
        "stop": "End before one of these strings.",
        "stop_regex": "End after the first text that matches one of these regular expressions.",
        "stop_sequences": "End before one of these strings.",
        "stop_token_ids": "End with one of these tokens.",
        "output_ids": "Tokens of the answer that the client has: the answer continues after them. "
        "They count as output; needs the seed of the answer. Several choices: a list for each.",
        "output_cursor": "With output_ids: where the stream stood after them, as its last comment "
        "had it. Several choices: a list, with null for a choice that has not begun.",
        "include_stop_str_in_output": "Keep the stop string in the answer.",
        "ignore_eos": "Continue after the end-of-text token.",
        "t_max_predict_ms": "End with the first line break after this time from the first token; "
        "0 or -1: no limit.",
        "n_indent": "End before a line that begins with fewer spaces and tabs; 0: any.",
        "response_fields": "Paths of the parts that the last object has, such as content and "
        "timings/prompt_n; all by default.",
        "skip_special_tokens": "Special tokens have no text in the answer; true by default.",
        "n_probs": "Return each token's log-probability and this many alternatives; 0: none.",
        "return_tokens": "Return the ids of the answer's tokens; a stream always has them.",
        "logprobs": "Return each token's log-probability and this many alternatives.",
        "top_logprobs": "Number of alternatives of each token; with logprobs: true.",
        "prompt_logprobs": "Return the prompt's log-probabilities and this many alternatives.",
        "logprob_token_ids": "With logprobs: return the log-probabilities of these ids, in place "
        "of the most probable ones.",
        "return_token_strs": "Also return each token's text.",
        "return_token_ids": "Return the ids of the prompt and of each answer's tokens.",
        "return_tokens_as_token_ids": "Name tokens in logprobs by their ids, as token_id:5.",
        "return_timings": "Return in usage how long the request waited and ran.",
        "timings": "Return counts, times and rates beside usage, in the form of llama.cpp.",
        "timings_per_token": "Return those in every chunk too.",
        "return_progress": "While streaming, send events of how much of the prompt is computed.",
        "return_cached_tokens_details": "Return in usage where cached tokens were found.",
        "speculation": "Propose tokens and verify them, for speed only: off, auto, or at most so "
        "many a step.",
        "prediction": "A text that the answer may repeat; for speed only.",
        "kv_transfer_params": "Hand the prompt's KV blocks over to another engine, or fetch them, "
        "in vLLM's form; see docs/disaggregation.md.",
    },
    "Embeddings and scores": {
        "encoding_format": "float: vectors are lists of numbers (default); base64: their "
        "little-endian f32 bytes.",
        "dimensions": "Keep this many numbers from the beginning of a vector, brought to length 1 "
        "again; only sizes for which the model was trained (Matryoshka).",
        "normalize": "Bring vectors to length 1; as the model's files say if it is left out.",
        "embd_normalize": "2: bring vectors to length 1 (default); -1: leave them as they are.",
        "task": "embed: one vector a text.",
        "top_n": "Return only this many documents; 0, the default: all.",
        "return_documents": "Return each document's text with its score; false by default.",
    },
    "Structured output": {
        "text": "format: the answer is free text, any JSON object, or JSON of a schema. "
        "verbosity: a hint, not used.",
        "response_format": "The answer is free text, any JSON object, JSON of a schema, or free "
        "text with parts that follow schemas.",
        "format": "The answer is any JSON object, or JSON of a schema.",
        "structured_outputs": "The answer follows a JSON schema, a regular expression, a choice "
        "of texts, a grammar (Lark or GBNF) or a structural tag; thinking: a limit of the "
        "reasoning before it, by its marks.",
    },
    "Tools, reasoning, templates": {
        "tools": "Functions that the model may call.",
        "tool_choice": "Whether the model may or must make a call, and of which function.",
        "parallel_tool_calls": "Whether the model may make several calls in one answer.",
        "think": "Whether the model reasons, or how much.",
        "reasoning_effort": "How much the model reasons, if its template has degrees.",
        "reasoning": "effort: how much the model reasons, if its template has degrees. summary: a "
        "hint, not used. context and mode: at auto and standard only.",
        "include": "message.output_text.logprobs: log-probabilities of the text. "
        "reasoning.encrypted_content: the reasoning, encoded, to be sent back, in stored responses "
        "too.",
        "include_reasoning": "Return the reasoning with the answer.",
        "thinking_token_budget": "End the reasoning after this many tokens, those of its closing "
        "mark included; -1: no limit.",
        "add_generation_prompt": "Open the model's answer at the end of the prompt.",
        "continue_final_message": "Continue the last message.",
        "chat_template": "The name of one of the model's templates; the source of a template only "
        "with --trust-request-chat-template.",
        "chat_template_kwargs": "Variables for the template; one that it does not read is ignored.",
        "documents": "Documents for the template.",
        "thinking": "Whether the model reasons: enabled, adaptive (both: yes) or disabled; the "
        "template's default if it is left out. budget_tokens: the reasoning ends after this many.",
        "output_config": "effort: how much the model reasons. format: a JSON schema that the "
        "answer follows.",
    },
    "Serving": {
        "stream": "Send the answer as server-sent events while it is generated.",
        "stream_options": "include_usage: one more chunk with the usage. "
        "continuous_usage_stats: the usage so far in every chunk. resumable: the stream "
        "can be resumed after a disconnect. include_output_ids: a comment after the events of each "
        "delta has what a request needs to continue the answer.",
        "include_output_ids": "In a stream, a comment after the events of each delta has what a "
        "request needs to continue the answer.",
        "cache_control": "A breakpoint of the cache: the prefix that ends there is kept longer.",
        "metadata": "user_id: a label of the user; without effect.",
        "store": "Keep the response, for GET and previous_response_id; true by default.",
        "background": "Answer at once, and continue without the client, which polls the response "
        "by its id or reads its events.",
        "service_tier": "There is one tier; without effect.",
        "keep_alive": "Without effect: the model stays loaded.",
        "truncate": "Shorten what is longer than the context; true by default.",
        "shift": "Not served: an answer ends where the context is full.",
        "verbose": "Without effect: tensors are not listed.",
        "id_slot": "Returned as it was sent; without effect, since there are no slots.",
        "cache_salt": "Share cached prefixes only with requests of the same salt.",
        "priority": "Lower is served earlier, under a policy that reads it.",
        "deadline_ms": "Limit of the time to the whole answer; refused if it cannot be met.",
        "ttft_slo_ms": "Limit of the time to the first token; refused if it cannot be met.",
        "tpot_slo_ms": "The longest mean time between tokens.",
    },
}
WORDS = {name: line for group in GROUPS.values() for name, line in group.items()}

# Descriptions that differ for chats.
OF_CHATS: Mapping[str, str] = {
    "echo": "Put the text of a last message of the assistant before the answer.",
    "max_tokens": "Maximum number of tokens of an answer; by default and at -1 the rest of the "
    "context. 0 only if the prompt is scored.",
    "logprobs": "Return each token's log-probability, those of reasoning, calls and their marks "
    "included.",
    "metadata": "Labels, which the answer repeats.",
    "service_tier": 'There is one tier, which the answer names "default".',
    "n": "Number of choices.",
    "add_special_tokens": "Add the tokenizer's special tokens to the text of the template; false "
    "by default.",
}

# Descriptions that differ for /v1/messages and its token count.
OF_MESSAGES: Mapping[str, str] = {
    "messages": "The conversation. Content is text, or a list of blocks: text, tool_use, "
    "tool_result, thinking.",
    "max_tokens": "Maximum number of tokens of the answer; it ends earlier where the context is "
    "full.",
    "tools": "Tools that the model may call, each with a name and an input_schema.",
    "logprobs": "Return the log-probability of each token beside the content; whole messages only.",
    "add_special_tokens": "Add the tokenizer's special tokens to the text of the template; false "
    "by default.",
}

# Descriptions that differ for /v1/responses.
OF_RESPONSES: Mapping[str, str] = {
    "top_logprobs": "Number of alternatives of each token; with include: "
    "message.output_text.logprobs.",
    "metadata": "Labels, which the response repeats.",
    "input": "A text, or the items of a conversation: messages, function_call, "
    "function_call_output, reasoning, item_reference. It may be left out where the request "
    "continues a conversation or a response.",
    "stream_options": "include_obfuscation: without effect.",
    "min_tokens": "Minimum number of tokens before the answer may end; at most max_output_tokens.",
    "add_special_tokens": "Add the tokenizer's special tokens to the text of the template; false "
    "by default.",
}

# Descriptions that differ for the count of a response's tokens.
OF_INPUT_TOKENS: Mapping[str, str] = {
    **{name: OF_RESPONSES[name] for name in ("input", "add_special_tokens")},
    "conversation": "Count the items of this conversation (POST /v1/conversations) before the "
    "input.",
    "previous_response_id": "Count the conversation of this stored response before the input.",
    "truncation": "auto: leave out the oldest items if all do not fit the context; disabled: "
    "count all.",
}

# Descriptions that differ for /tokenize, /detokenize and /apply_template.
OF_TEXTS: Mapping[str, str] = {
    "prompt": "The text; or give messages.",
    "messages": "The conversation, rendered by the model's template.",
    "add_special_tokens": "Add the tokenizer's special tokens to the text; by default true for a "
    "prompt, false for messages.",
    "skip_special_tokens": "Leave special tokens out of the text; false by default.",
}

# Descriptions that differ for embeddings and scores.
OF_EMBEDDINGS: Mapping[str, str] = {
    "input": "A text, texts, token ids, or lists of ids; one vector for each.",
    "documents": "Texts, or objects with a text; of a score, another name of text_2.",
    "add_special_tokens": "Add the tokenizer's special tokens to each text; true by default.",
    "truncate_prompt_tokens": "Cut longer inputs to this many tokens, special tokens included; -1: "
    "to the context length. Without it they are refused.",
    "truncation_side": "With truncate_prompt_tokens: right cuts off the end of an input (default), "
    "left its beginning.",
}
