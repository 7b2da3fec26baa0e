"""Process groups outside ``torch.distributed``'s default one."""
