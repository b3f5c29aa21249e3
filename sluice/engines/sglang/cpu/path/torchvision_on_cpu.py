"""Makes torchvision importable with a CPU build of torch, in every process of the environment.

SGLang and transformers import torchvision if it is installed. Its wheel on PyPI is a CUDA build:
with a CPU torch its operators do not load, and the import fails because it registers fake kernels
for two operators that do not exist. Declaring their schemas before the first import is enough. No
kernel is added, so calling them raises.
"""

import importlib.abc
import sys
from typing import Any


class _DeclareOperators(importlib.abc.MetaPathFinder):
    library: Any = None

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        if torch.version.cuda is None:
            library: Any = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    library.define(
                        f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
            _DeclareOperators.library = library  # the schemas live as long as the library object


sys.meta_path.insert(0, _DeclareOperators())
