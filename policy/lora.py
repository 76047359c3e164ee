"""The policy: a frozen base model in its own dtype, and a LoRA adapter in fp32 on its inner linear layers.

Where it departs from PEFT: a layer's forward and backward are written out, so only its input is kept for the backward
and nothing is copied to fp32; and what vLLM could not serve, or packed rows not reproduce, is refused before a step.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.tuners_utils import check_target_module_exists
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from config import SERVED_LORA_RANKS, Config
from policy import packing


def check_lora(lora: LoraConfig, model: PreTrainedModel) -> None:
    """ValueError with reason and cure if replicas could not serve, or the trainer not reproduce, such an adapter."""
    keeps_base = (True, False, "gaussian", "orthogonal")
    refused = [
        (not 1 <= lora.r <= SERVED_LORA_RANKS[-1], f"rank {lora.r}: vLLM serves 1 to {SERVED_LORA_RANKS[-1]}"),
        (lora.rank_pattern or lora.alpha_pattern, "rank_pattern, alpha_pattern: vLLM reads one rank and one alpha"),
        (lora.use_dora, "use_dora: vLLM does not serve DoRA; set it to False"),
        (lora.modules_to_save, "modules_to_save: vLLM serves LoRA weights only; set it to None"),
        (lora.trainable_token_indices, "trainable_token_indices: vLLM serves LoRA weights only; set it to None"),
        (lora.target_parameters, "target_parameters: vLLM serves LoRA on modules only; use target_modules"),
        (lora.bias != "none" or lora.lora_bias, 'bias: vLLM does not serve a trained bias; set it to "none"'),
        (lora.lora_dropout, f"lora_dropout {lora.lora_dropout}: the ratio would not be 1 on-policy; set it to 0"),
        (lora.init_lora_weights not in keeps_base, f"init_lora_weights {lora.init_lora_weights}: it changes the base "
         "weights, and replicas would not know; set it to True"),
    ]  # fmt: skip
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    outer = [name for name, module in model.named_modules() if module in ends]
    hit = [name for name in outer if lora.target_modules and check_target_module_exists(lora, name)]
    refused.append((hit, f"on {', '.join(hit)}: replicas serve it on inner layers only; drop it from target_modules"))
    for bad, message in refused:
        if bad:
            raise ValueError(f"LoRA {message}")


def check_layers(base: PreTrainedModel) -> None:
    """ValueError if the model has weights that LoRA on linear layers would leave out, or could not be computed."""
    name = type(base).__name__
    if any(isinstance(module, transformers.pytorch_utils.Conv1D) for module in base.modules()):
        raise ValueError(f"{name}: its layers are Conv1D, not Linear: choose a model like Qwen2, Qwen3 or Llama")
    fused = next((key for key, parameter in base.named_parameters() if parameter.ndim == 3), None)
    if fused:
        raise ValueError(f"{name}: {fused} holds all experts in one parameter, which LoRA on linear layers leaves out: "
                         "choose a dense model")  # fmt: skip


class LoraProduct(torch.autograd.Function):
    """x W' + bias + scaling * x A' B' for a frozen W: one pass over the output, and only x is kept for the backward."""

    @staticmethod
    def forward(ctx, x, weight, bias, lora_a, lora_b, scaling):
        a, b = lora_a.to(x.dtype), lora_b.to(x.dtype)
        low = (a @ x.flatten(0, -2).T) * scaling  # (r, T): thin matrices are fast this way round
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scaling = scaling
        output = F.linear(x, weight, bias)
        output.flatten(0, -2).addmm_(low.T, b.T)
        return output

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b, low = ctx.saved_tensors
        x, rows = x.flatten(0, -2), grad.flatten(0, -2)  # (T, in), (T, out)
        grad_low = (b.T @ rows.T) * ctx.scaling  # (r, T)
        grad_a, grad_b = (grad_low @ x).float(), (low @ rows).T.float()
        if not ctx.needs_input_grad[0]:
            return None, None, None, grad_a, grad_b, None
        grad_x = grad @ weight
        grad_x.flatten(0, -2).addmm_(grad_low.T, a)
        return grad_x, None, None, grad_a, grad_b, None


class LoraLinear(PeftLinear):
    """PEFT's layer in the dtype of the base, as replicas compute it; PEFT's own forward copies x and output to fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) to (..., out)."""
        base, a, b = self.base_layer, self.lora_A["default"].weight, self.lora_B["default"].weight
        return LoraProduct.apply(x, base.weight, base.bias, a, b, self.scaling["default"])


def load_base(cfg: Config) -> PreTrainedModel:
    """The base model in cfg.dtype, on the CPU."""
    return AutoModelForCausalLM.from_pretrained(cfg.model, dtype=getattr(torch, cfg.dtype))


def add_lora(base: PreTrainedModel, cfg: Config, device: torch.device | str) -> PeftModel:
    """`base` frozen on device, with a LoRA adapter on all inner linear layers that depends on cfg.seed only."""
    lora = LoraConfig(r=cfg.lora_rank, lora_alpha=cfg.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    check_lora(lora, base)
    check_layers(base)
    AttentionInterface.register("packed", packing.packed_attention)
    base.set_attn_implementation("packed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(cfg.seed)
        model = get_peft_model(base, lora).to(device)  # PEFT keeps the adapter in fp32
    for layer in model.modules():
        if type(layer) is PeftLinear:
            layer.__class__ = LoraLinear
    if cfg.gradient_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
    if torch.device(device).type == "cuda":  # each length of a row is compiled with and without a backward
        torch._dynamo.config.recompile_limit = 4 * packing.ROW_SHAPES
        for layer in getattr(base, base.base_model_prefix).layers if cfg.compile else []:
            layer.compile(dynamic=False)
    return model.train(cfg.gradient_checkpointing)  # transformers checkpoints in training mode only


def lora_parameters(model: PeftModel) -> dict[str, torch.nn.Parameter]:
    """The trained parameters under the names that PEFT saves them by."""
    return {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}


def adapter_state(model: PeftModel) -> dict[str, np.ndarray]:
    """Copies of the LoRA tensors on the CPU, as adapter_model.safetensors holds them."""
    return {name: p.detach().to("cpu", copy=True).numpy() for name, p in lora_parameters(model).items()}


@torch.no_grad()
def load_adapter_state(model: PeftModel, state: dict[str, torch.Tensor]) -> None:
    """Put saved LoRA tensors into the model; ValueError if they are not this model's."""
    parameters = lora_parameters(model)
    wrong = {name for name in state.keys() & parameters.keys() if state[name].shape != parameters[name].shape}
    wrong |= state.keys() ^ parameters.keys()
    if wrong:
        raise ValueError(f"saved adapter does not fit the model, {len(wrong)} tensors differ, such as {min(wrong)}: "
                         "resume with the model and the LoRA flags it was saved with")  # fmt: skip
    for name, parameter in parameters.items():
        parameter.copy_(state[name])


def adapter_config(model: PeftModel) -> dict:
    """adapter_config.json as PEFT writes it."""
    with tempfile.TemporaryDirectory() as directory:
        model.peft_config["default"].save_pretrained(directory)
        return json.loads(Path(directory, "adapter_config.json").read_text()) | {"inference_mode": True}
