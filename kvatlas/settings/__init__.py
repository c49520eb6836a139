"""Settings: one class per process. Each field is both a flag and an environment variable; flags take precedence.

    field `nats_url`  =  flag `--nats-url`  =  variable `KVATLAS_NATS_URL`

    process.py      settings of every process; reads flags and variables; a mistake is one line (`SettingsError`)
    field_types.py  types of fields: URLs, ports, names, lists
    commands.py     up, collect, doctor, top, and queries about one block or prompt
    engine.py       API keys of engines, and CA certificates to verify them
    http.py         limits, certificate and tokens of an HTTP server
    clients.py      clients of several tenants, and the port for operators
    lookup.py       how prompts are read and looked up
    index_server.py, indexer.py, publisher.py, proxy.py, gateway.py

The command line makes its flags from these classes (`kvatlas_cli.flags`), so the three spellings can't drift apart.
"""

from kvatlas.settings.commands import (
    BlockSettings,
    CollectSettings,
    DoctorSettings,
    LayoutSettings,
    PromptSettings,
    QuerySettings,
    RecordSettings,
    TopSettings,
    UpSettings,
)
from kvatlas.settings.field_types import (
    CommaList,
    HttpUrl,
    Labels,
    Name,
    NatsUrl,
    Port,
    RedisUrl,
    WorkerId,
    ZmqEndpoint,
)
from kvatlas.settings.gateway import GatewaySettings
from kvatlas.settings.http import HttpSettings
from kvatlas.settings.index_server import IndexServerSettings
from kvatlas.settings.indexer import IndexerSettings
from kvatlas.settings.process import (
    COMMON,
    ENV_PREFIX,
    OWN,
    HelpGroups,
    NatsSettings,
    ProcessSettings,
    ServerSettings,
    Settings,
    flag_of,
    variable_of,
)
from kvatlas.settings.proxy import ProxySettings, RoutingSettings
from kvatlas.settings.publisher import PublishSettings

__all__ = [
    "COMMON",
    "ENV_PREFIX",
    "OWN",
    "BlockSettings",
    "CollectSettings",
    "CommaList",
    "DoctorSettings",
    "GatewaySettings",
    "HelpGroups",
    "HttpSettings",
    "HttpUrl",
    "IndexServerSettings",
    "IndexerSettings",
    "Labels",
    "LayoutSettings",
    "Name",
    "NatsSettings",
    "NatsUrl",
    "Port",
    "ProcessSettings",
    "PromptSettings",
    "ProxySettings",
    "PublishSettings",
    "QuerySettings",
    "RecordSettings",
    "RedisUrl",
    "RoutingSettings",
    "ServerSettings",
    "Settings",
    "TopSettings",
    "UpSettings",
    "WorkerId",
    "ZmqEndpoint",
    "flag_of",
    "variable_of",
]
