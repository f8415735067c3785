"""`flashify`: the attention of any function, computed by `jax_flash2.attention`.

The stages, in the order in which they run: `graph` (a traced function, with calls seen
through), `alike` (whether two pieces of it are the same), `meaning` (what masks mean),
`digits` and `facts` (what a value is of a softmax over scores), `match` (rules from
operations to facts) and `layers` (what equal layers are spared), `axes`, `masks` and
`sites` (what one call of `attention` takes), `plan` (which sites are replaced), then
`runs` (what equal layers share), `rewrite` and `evaluate` (the program with the sites)
and `report`.
"""

from jax_flash2._flashify.report import Report, SiteReport
from jax_flash2._flashify.transform import Flashified, flashify

__all__ = ["Flashified", "Report", "SiteReport", "flashify"]
