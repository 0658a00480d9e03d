"""The families that are known, by their name in config.json."""

from model.families.base import Family
from model.families.gemma2 import GEMMA2
from model.families.gemma3 import GEMMA3
from model.families.granite import GRANITE
from model.families.llama import LLAMA
from model.families.mistral import MISTRAL
from model.families.mixtral import MIXTRAL
from model.families.olmo2 import OLMO2
from model.families.phi3 import PHI3
from model.families.qwen2 import QWEN2
from model.families.qwen2_moe import QWEN2_MOE
from model.families.qwen3 import QWEN3
from model.families.qwen3_moe import QWEN3_MOE
from model.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, GRANITE, OLMO2, PHI3, GEMMA2, GEMMA3),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE),
    )
}
