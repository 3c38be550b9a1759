"""The whole model once more, in numpy float64 with plain loops, from the words of the specification.

Shares no code with the package but the configuration and the definition of which windows have closed (a list).
"""

import numpy as np


def norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def turn(x, position, theta, dims):
    """RoPE of one head's vector [H] on its last `dims` channels."""
    x = x.copy()
    half = dims // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / dims)
        a, b = x[len(x) - dims + i], x[len(x) - dims + half + i]
        x[len(x) - dims + i] = a * np.cos(angle) - b * np.sin(angle)
        x[len(x) - dims + half + i] = b * np.cos(angle) + a * np.sin(angle)
    return x


def windows_closed(cfg, t):
    """Positions of each window whose last position is t or earlier."""
    found, start = [], cfg.origin
    while cfg.window is not None and start + cfg.window - 1 <= t:
        found.append(list(range(start, start + cfg.window)))
        start += cfg.stride
    return found


def exact_positions(cfg, t):
    if cfg.window is None:
        return list(range(t + 1))
    if cfg.exact == "window":
        return list(range(max(0, t - cfg.exact_width + 1), t + 1))
    closed = windows_closed(cfg, t)
    if cfg.exact == "none" and closed:
        return []
    return list(range(closed[-1][-1] + 1 if closed else 0, t + 1))


def entry(cfg, branch, hidden, positions, head, gates=None):
    """One compressed entry of one KV head, before key norm and RoPE; gates [W, K, g] weigh it where given."""
    which = {"offset": lambda i: i, "part": lambda i: i // cfg.stride, "all": lambda i: 0}[cfg.map_sharing]
    logits, payloads = [], []
    for i, p in enumerate(positions):
        if p < 0:
            continue
        payload = hidden[p] @ branch["payload"][which(i)][:, head]
        if cfg.post_norm:
            payload = norm(payload, branch["norm"], cfg.norm_eps)
        logit = np.zeros(1)
        if cfg.gate != "uniform":
            logit = hidden[p] @ branch["gate"][which(i)][:, head]
            if cfg.gate_bias:
                logit = logit + branch["bias"][i, head]
        logits.append(logit)
        payloads.append(payload)
    weights = np.exp(np.array(logits) - np.max(logits, axis=0))
    weights = weights / weights.sum(axis=0) if gates is None else gates[-len(payloads) :, head]
    return (weights * np.array(payloads)).sum(axis=0)


def attention(cfg, params, hidden, outputs, gates, also):
    """`outputs` {(t, n): [H]} stand for those of query head n at t, `gates` {branch: [J, W, K, g]} for the learned, and
    the last query sees the exact tokens `also` beside its own."""
    length = len(hidden)

    def entry_of(branch, j, positions, head):
        given = gates[branch][j] if branch in gates else None
        return entry(cfg, params[branch], hidden, positions, head, given)

    def positioned(x, scale, t):
        x = norm(x, params[scale], cfg.norm_eps) if cfg.qk_norm else x
        return turn(x, t, cfg.rope_theta, cfg.head_dim if cfg.rope_dims is None else cfg.rope_dims)

    out = np.zeros_like(hidden)
    for n in range(cfg.query_heads):
        head = n // (cfg.query_heads // cfg.kv_heads)
        key = [positioned(hidden[t] @ params["key"][:, head], "k_norm", t) for t in range(length)]
        value = key if cfg.tied_kv else [hidden[t] @ params["value"][:, head] for t in range(length)]
        entries = []
        for j, positions in enumerate(windows_closed(cfg, length - 1)):
            at = positions[0] + cfg.window - cfg.stride
            entry_key = positioned(entry_of("compress_key", j, positions, head), "k_norm", at)
            entry_value = entry_key if cfg.tied_kv else entry_of("compress_value", j, positions, head)
            entries.append((entry_key, entry_value))
        for t in range(length):
            exact = exact_positions(cfg, t)
            if t == length - 1:
                exact = sorted({*exact, *also})
            seen = entries[: len(windows_closed(cfg, t))] + [(key[u], value[u]) for u in exact]
            q = positioned(hidden[t] @ params["query"][:, n], "q_norm", t)
            scores = np.array([q @ k for k, _ in seen]) * cfg.head_dim**-0.5
            weights = np.exp(scores - scores.max())
            mixed = sum(w * v for w, (_, v) in zip(weights / weights.sum(), seen, strict=True))
            out[t] += outputs.get((t, n), mixed) @ params["out"][n]
    return out


def forward(cfg, params, tokens, outputs=None, gates=None, also=None):
    """Logits [T, V] of one sequence of tokens [T]; params as the package names them, as numpy float64.

    `outputs`, `gates` and `also` are what `attention` changes, by layer.
    """
    outputs, gates, also = outputs or {}, gates or {}, also or {}
    hidden = params["embedding"][np.asarray(tokens)]
    for layer in range(cfg.layers):
        p = _layer(params["layers"], layer)
        hidden = hidden + attention(
            cfg,
            p["attention"],
            norm(hidden, p["attention_norm"], cfg.norm_eps),
            outputs.get(layer, {}),
            gates.get(layer, {}),
            also.get(layer, []),
        )
        x = norm(hidden, p["mlp_norm"], cfg.norm_eps)
        gate, up = x @ p["mlp"]["gate"], x @ p["mlp"]["up"]
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ p["mlp"]["down"]
    return norm(hidden, params["final_norm"], cfg.norm_eps) @ params["embedding"].T * cfg.logit_scale


def _layer(tree, layer):
    return {k: _layer(v, layer) if isinstance(v, dict) else v[layer] for k, v in tree.items()}
