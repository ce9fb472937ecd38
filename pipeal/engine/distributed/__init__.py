"""The engine in several processes, one per stage and replica, on ``torch.distributed``."""
