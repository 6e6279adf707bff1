"""`from distrun import kvstore`: the runtime's key-value store by another name. Nothing inside imports this."""

from distrun_runtime.kvstore import *  # noqa: F403
