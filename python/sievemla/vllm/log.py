# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
"""Below vLLM's own logger, which is the one that has a handler."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.sievemla")
