"""The names of :mod:`pipeal.atomic`, for those who know them here."""

from pipeal.atomic import replacing, sync_folder, write_whole

__all__ = ["replacing", "sync_folder", "write_whole"]
