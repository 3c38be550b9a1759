"""The axis legend: one letter an axis, the same in einsum strings, shapes in docstrings and type aliases.

    B  batch                 J  compressed entries     D  model width
    R  phase replicas        U  exact tokens           F  MLP width
    T  query positions       W  offsets in a window    V  vocabulary
    N  query heads           M  payload streams        L  layers
    K  KV heads              H  head_dim
    G  query heads that read one KV head, N / K: query head n reads KV head n // G

Two more letters are local to the attention code: `c` counts blocks of queries, `q` positions inside one block.
"""

from jaxtyping import Array, Float, Int

Tokens = Int[Array, "B T"]
Hidden = Float[Array, "B T D"]
Queries = Float[Array, "B T N H"]
ExactKV = Float[Array, "B T K H"]
Entries = Float[Array, "B J K H"]
KeysAndValues = tuple[Array, Array]
Payload = Float[Array, "B T M K H"]
GateLogits = Float[Array, "B T M K g"]  # g is d_g: 1 for scalar gates, H for vector gates
GateBias = Float[Array, "W K g"]
