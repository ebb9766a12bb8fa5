"""The limit of open files is raised as far as this user may."""

import resource

from ssd_serve.base.descriptors import descriptor_limit, raise_descriptor_limit


def test_the_soft_limit_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert descriptor_limit() == 256
        assert raise_descriptor_limit() == (256, hard)
        assert descriptor_limit() == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
