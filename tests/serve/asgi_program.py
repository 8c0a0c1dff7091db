"""The built-in model for another ASGI server: `uvicorn tests.serve.asgi_program:app`."""

from __future__ import annotations

from quire.api.asgi import build_asgi

app = build_asgi(threads=1, max_num_seqs=4, kv_touch_ahead=0, grace_seconds=20)
