"""Expert banks as torch modules for one's own model; each returns ``(output, Routing)``."""

from gar.nn.bank import Call, Experts, Factors, RoutedExperts, expert_banks
from gar.nn.ffn import FFNExperts, RoutedFFN
from gar.nn.head import RoutedHead
from gar.nn.lora import LoRAExperts, RoutedLoRA

__all__ = [
    "Call",
    "Experts",
    "FFNExperts",
    "Factors",
    "LoRAExperts",
    "RoutedExperts",
    "RoutedFFN",
    "RoutedHead",
    "RoutedLoRA",
    "expert_banks",
]
