"""Every limit of the project, in one table, each with its unit in the name."""

from __future__ import annotations

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# Files and documents
SAFETENSORS_HEADER_BYTES: Final = 1 * MIB
CONFIG_BYTES: Final = 64 * KIB
BASE_CONFIG_BYTES: Final = 256 * KIB
DECLARATION_BYTES: Final = 32 * KIB
MANIFEST_BYTES: Final = 256 * KIB
CATALOG_BYTES: Final = 32 * MIB
# Gemma writes a tokenizer_config.json of over 1 MiB.
DOC_BYTES: Final = 4 * MIB
TOKENIZER_FILE_BYTES: Final = 64 * MIB
WEIGHT_BYTES: Final = 4 * GIB
ADAPTER_FILES: Final = 32
JSON_DEPTH: Final = 32

# Tensors
TENSORS: Final = 20_000
TENSOR_NAME_CHARS: Final = 512
TENSOR_DIMS: Final = 8
METADATA_CHARS: Final = 16 * KIB
PATTERN_MATCHES: Final = 2_000_000
RANK: Final = 512
ALPHA: Final = 65_536
TARGETS: Final = 1_024
# The factor of B·A from which a person has to look: published configs lie at 8 or below.
SCALING_REVIEW: Final = 10.0
# How many times an alias's present version's factor, or its inverse, asks for a look.
SCALING_CHANGE: Final = 4.0
EXPRESSION_CHARS: Final = 1_024
TOKEN_INDICES: Final = 65_536
CATALOG_MODULES: Final = 200_000

# Names and text
NAME_CHARS: Final = 63
SUBJECT_CHARS: Final = 128
REASON_CHARS: Final = 1_000
SHOWN_CHARS: Final = 160

# Requests, uploads, tokens and leases
REQUEST_BODY_BYTES: Final = 48 * MIB
DOCUMENT_BODY_BYTES: Final = 2 * MIB
OPEN_UPLOADS: Final = 1_000
REPORT_BYTES: Final = 8 * MIB
REPORT_FINDINGS: Final = 5_000
REPORT_MODULE_GROUPS: Final = 256
REPORT_ALIASES: Final = 16
UPLOAD_AGE_SECONDS: Final = 24 * 3600
UPLOAD_RESERVE_STEP_BYTES: Final = 16 * MIB
BLOB_LEASE_SECONDS: Final = 24 * 3600
TENANT_QUOTA_BYTES: Final = 100 * GIB
PAGE_ROWS: Final = 200
PAGE_ROWS_DEFAULT: Final = 50
JOB_LEASE_SECONDS: Final = 30
JOB_ATTEMPTS: Final = 3
NODE_LEASE_SECONDS: Final = 15
FEED_WAIT_SECONDS: Final = 25
TOKEN_TTL_SECONDS: Final = 90 * 24 * 3600
ROUTING_CONTEXT_SECONDS: Final = 60
REVOCATION_LIST_SECONDS: Final = 600
REVOCATION_LIST_BYTES: Final = 16 * MIB
# As many as fit in those bytes, each with everything that it may say.
REVOCATION_LIST_ENTRIES: Final = 32_768
CLOCK_SKEW_SECONDS: Final = 60
VERDICT_SECONDS: Final = 30 * 24 * 3600
BASE_STATEMENT_SECONDS: Final = 3650 * 24 * 3600

# A validation child
CHILD_CPU_SECONDS: Final = 600
CHILD_WALL_SECONDS: Final = 900
CHILD_ADDRESS_BYTES: Final = 64 * GIB
CHILD_RESULT_BYTES: Final = REPORT_BYTES

# The process that matches regular expressions; seconds of processor time, then of the clock.
MATCH_EXPRESSIONS: Final = 4 * TARGETS + 2
MATCH_CPU_SECONDS: Final = 2
MATCH_WALL_SECONDS: Final = 30
MATCH_ADDRESS_BYTES: Final = 512 * MIB
MATCH_ANSWER_BYTES: Final = 16 * MIB

# A serving node
PROMPT_TOKENS: Final = 8_192
PROMPT_CHARS: Final = 128 * KIB
NEW_TOKENS: Final = 4_096

# What a request to a serving node may say
ASKED_BYTES: Final = 1 * MIB
ASKED_SECONDS: Final = 10
# Of all callers together, those that keep theirs open between requests included.
NODE_CONNECTIONS: Final = 1_024
MODEL_CHARS: Final = 256
MESSAGES: Final = 256
CHOICES: Final = 8
STOPS: Final = 4
STOP_CHARS: Final = 256
COMPLETION_LOGPROBS: Final = 5
CHAT_LOGPROBS: Final = 20
SEQUENCES: Final = 1_024
TENANT_SEQUENCES: Final = 64
# Of the requests that start at once, those that wait for loads or renderings are but a part.
STARTING_REQUESTS: Final = 256
LOAD_WAITS: Final = 128
TENANT_LOAD_WAITS: Final = 32
RENDERINGS: Final = 64
TENANT_RENDERINGS: Final = 32
USAGE_ITEMS: Final = 1_000
USAGE_TUPLES: Final = 10_000
USAGE_SECONDS: Final = 10
DRAIN_SECONDS: Final = 30
TEMPLATE_BYTES: Final = 1 * MIB
TEMPLATE_CHARS: Final = 1 * MIB
TEMPLATE_CPU_SECONDS: Final = 1
TEMPLATE_WAIT_SECONDS: Final = 10
TEMPLATE_MEMORY_BYTES: Final = 512 * MIB

# KV, its keys, and sessions' slots on disk
ADAPTER_SCALE: Final = 16.0
KV_LAYERS: Final = 512
KV_LAYOUT_SIZE: Final = 1_000_000
SLOT_STATE_BYTES: Final = 1 * GIB
SLOT_SIDECAR_BYTES: Final = 32 * KIB
SLOT_INDEX_BYTES: Final = 8 * MIB
SLOTS: Final = 4_096
SLOT_TENANT_BYTES: Final = 4 * GIB
SLOT_NODE_BYTES: Final = 32 * GIB
# What a turn gives the save of the one before it, which else is computed again.
SLOT_SAVE_WAIT_SECONDS: Final = 2
# Of the memory that a node has free when it starts, for pages that are read and states to be saved.
SLOT_MEMORY_PERCENT: Final = 50
SLOT_TENANT_MEMORY_PERCENT: Final = 25
SESSION_CHARS: Final = 256

# Pulled files on a node's disk, and how many adapters a heartbeat may name
STORED_ADAPTERS: Final = 4_096
STORE_TENANT_BYTES: Final = 64 * GIB
STORE_NODE_BYTES: Final = 128 * GIB
# Left free for revocation marks, the feed's index and slots.
STORE_FREE_BYTES: Final = 1 * GIB
HEARTBEAT_RESIDENTS: Final = 10_000

# Adapters that all nodes of one base hold together, each node's counted, and one tenant's of them
POOL_ADAPTERS: Final = 4_096
POOL_TENANT_ADAPTERS: Final = 2_048

# What a serving node takes at its start, and loads
NODE_RUNNING: Final = 16
# Half of the lanes: what runs is never stopped for another one, and may run for minutes.
TENANT_RUNNING: Final = 8
NODE_TOKENS: Final = 2048
ADAPTER_SEQUENCES: Final = 32
NODE_ADAPTERS: Final = 16
NODE_RANK: Final = 16
# Half of the bank: what a tenant has in use never goes, so that one which uses all rows at once
# would leave no other one any.
TENANT_ADAPTERS: Final = 8
TENANT_LOADS_PER_MINUTE: Final = 60
ADAPTER_MARK_PERCENT: Final = 90
NODE_MEMORY_PERCENT: Final = 80
# Loads of half a second each by two threads, within the time that is waited for one.
LOAD_QUEUE: Final = 64
TENANT_LOAD_QUEUE: Final = 16
LOAD_THREADS: Final = 2
# Less than a routing context lives: whoever waits in vain is told to come back, and not that the
# context is over.
LOAD_WAIT_SECONDS: Final = 50
LOAD_PAUSE_FIRST_SECONDS: Final = 1
LOAD_PAUSE_PASSING_SECONDS: Final = 10
LOAD_PAUSE_MOST_SECONDS: Final = 300
LOAD_FAILURES: Final = 10_000
