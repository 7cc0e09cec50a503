"""Read by each Python with this directory on its path: SGLang's KV over NIXL, on a machine without a GPU.

SGLang 0.5.23 says to NIXL that its KV lies in a GPU's memory, wherever it does (`disaggregation/nixl/conn.py`).
"""

from typing import Any

try:
    from nixl_cu13._api import nixl_agent
except ImportError:
    pass
else:

    def _in_memory(name: str) -> None:
        of_nixl = getattr(nixl_agent, name)

        def called(self: Any, *given: Any, **named: Any) -> Any:
            return of_nixl(
                self,
                *("DRAM" if isinstance(each, str) and each == "VRAM" else each for each in given),
                **{key: "DRAM" if isinstance(each, str) and each == "VRAM" else each for key, each in named.items()},
            )

        setattr(nixl_agent, name, called)

    for _name in ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist"):
        _in_memory(_name)
