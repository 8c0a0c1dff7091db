"""Answers that a request has begun: a conversation that ends with a message of the assistant.

For APIs that have no field for it, so that errors name the messages. Knows no API.
"""

from __future__ import annotations

from quire.api.generation.chat_output import Conversation
from quire.api.generation.conversation import ConversationFields, rendered
from quire.api.generation.request_context import RequestContext
from quire.base.errors import InvalidParameter


async def rendered_or_refused(request: RequestContext, fields: ConversationFields) -> Conversation:
    """Render a conversation; name `messages` where the template cannot continue the last one."""
    try:
        return await rendered(request, fields)
    except InvalidParameter as error:
        if error.param != "continue_final_message":
            raise
        raise InvalidParameter(
            "messages ends with a message of the assistant, which the answer continues, and this "
            "model's template does not write its text as it is; end with a message of the user",
            param="messages",
        ) from error
