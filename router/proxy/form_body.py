"""Finds the model that a form names (multipart/form-data, RFC 7578). Such forms carry audio for transcription."""

from email.message import Message
from email.parser import BytesHeaderParser

from kvatlas_router.proxy.json_body import UnreadableBody
from kvatlas_router.tenancy.withheld_fields import is_refused
from router_client.pricing.transfer_protocol import WITHHELD, NotForClients

MAX_FIELDS = 1_000
MAX_HEAD_BYTES = 4_096
MAX_NAME_BYTES = 1_024


def find_form_model(content_type: str, body: bytes, *, of_tenant: bool = False) -> str | None:
    """The last `model` field, which is the one that engines use; None if there is none.

    Raises UnreadableBody for a form that two parsers may read differently, or NotForClients for a field that clients must not
    send to engines.
    """
    border = b"\r\n--" + _boundary(content_type)
    at = len(border) - 2
    if not body.startswith(border[2:]):
        raise UnreadableBody("the form does not begin with its boundary")
    model: str | None = None
    for _ in range(MAX_FIELDS):
        if body.startswith(b"--", at):
            return model
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        end = body.find(border, head_end + 2)
        if not body.startswith(b"\r\n", at) or head_end < 0 or end < 0:
            raise UnreadableBody(
                "the form has a field without an end; expected the boundary and two hyphens at its end"
            )
        name = _field_name(body[at + 2 : head_end + 4])
        if name in WITHHELD or (of_tenant and is_refused(name, None)):
            raise NotForClients(f"the form has a field {name}, which clients must not send; remove it")
        if name == "model":
            value = body[head_end + 4 : end][:MAX_NAME_BYTES]
            model = value.decode("utf-8", "replace") or None
        at = end + len(border)
    raise UnreadableBody(f"the form has more than {MAX_FIELDS} fields, which is the limit")


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
        raise UnreadableBody(f"content-type is {content_type[:80]!r}; expected multipart/form-data with a boundary")
    return boundary.encode("ascii")


def _field_name(head: bytes) -> str:
    fields = BytesHeaderParser().parsebytes(head)
    name = fields.get_param("name", header="content-disposition")
    if len(fields.get_all("content-disposition", [])) != 1 or not isinstance(name, str):
        raise UnreadableBody(
            "the form has a field without a plain name; expected `content-disposition: form-data; name=...`"
        )
    return name
