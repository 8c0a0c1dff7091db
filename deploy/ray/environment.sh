# Source this before `ray start`, on every node of a cluster that serves Quire.
# The jobs API runs whatever it is sent, so it needs a token (`ray get-auth-token --generate`; give
# the same one to all nodes).
export RAY_AUTH_MODE=token
# HAProxy sends requests to routers directly; Serve's Python proxy would be on the way of each token.
export RAY_SERVE_ENABLE_HA_PROXY=1
# Send no usage statistics.
export RAY_USAGE_STATS_ENABLED=0
