"""Optimizers that keep tensors of subclasses, in two parts, or sparse."""

import torch
from sample_optimizers import SGD, parameters_of


class Halves(torch.Tensor):
    """A tensor in two parts: of whole numbers, and of what is left."""

    @staticmethod
    def __new__(cls, whole, rest, note="plain"):
        return torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=rest.dtype)

    def __init__(self, whole, rest, note="plain"):
        self.whole, self.rest, self.note = whole, rest, note

    @classmethod
    def of(cls, value, note="plain"):
        whole = value.round()
        return cls(whole.to(torch.int32), value - whole, note)

    def joined(self):
        return self.whole + self.rest

    def __tensor_flatten__(self):
        return ["whole", "rest"], {"note": self.note, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["whole"], inner["rest"], context["note"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func} of Halves")

    __torch_function__ = torch._C._disabled_torch_function_impl


class OtherHalves(Halves):
    """Another class with the same parts."""


class Compressed(SGD):
    """Keeps the momentum of parameters of 4096 elements or more in two parts."""

    kind = Halves

    def __init__(self, params):
        super().__init__(params, lr=1.0)

    @torch.no_grad()
    def step(self, closure=None):
        for p in parameters_of(self):
            held = self.state[p].get("momentum", torch.zeros_like(p))
            held = held.joined() if isinstance(held, Halves) else held
            new = held.mul(0.5).add_(p.grad)
            self.state[p]["momentum"] = self.keep(new) if p.numel() >= 4096 else new
            p.sub_(new)

    def keep(self, value):
        return self.kind.of(value, "large")


class OtherCompressed(Compressed):
    kind = OtherHalves


class Sparse(Compressed):
    """Keeps that of large ones in a sparse tensor, which no file can hold."""

    def keep(self, value):
        return value.to_sparse()
