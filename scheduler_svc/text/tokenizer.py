"""A model's tokenizer: text to ids and back, exactly as its own library does it."""

import tokenizers

from scheduler_svc.errors import FieldViolation, InvalidRequest
from scheduler_svc.text.bundle import BadBundle, Bundle, open_bundle
from scheduler_svc.text.chat import ChatTemplate, chat_template_source
from scheduler_svc.text.decoders import IncrementalDecoder, decoder_makers, token_bytes
from scheduler_svc.text.memory import release_unused_memory
from scheduler_svc.text.panics import panics_as_errors
from scheduler_svc.text.sampling_defaults import sampling_defaults
from scheduler_svc.text.special_tokens import add_missing_tokens, special_token_texts
from scheduler_svc.text.token_bound import TokenBound

# After a text of this size the library's freed memory is worth giving back.
_LARGE_TEXT_CHARS = 1 << 20


class Tokenizer:
    """Safe to use from several threads at once. Made by `from_bundle`."""

    def __init__(self, library: tokenizers.Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._library = library
        self._chat_template = chat_template
        self._bound = TokenBound(library)
        self.sampling_defaults: dict[str, float] = {}
        self.model_type = ""  # as the model's configuration says
        self._decoder_makers = decoder_makers(library)

    @classmethod
    def from_bundle(cls, data: bytes) -> "Tokenizer":
        """Load a bundle. Takes a second or two for large vocabularies. BadBundle says what is wrong with it.

        What is put at the ends of a text is up to tokenizer.json alone: as in transformers 5, `add_bos_token` and
        `add_eos_token` of tokenizer_config.json mean nothing beside it.
        """
        try:
            with panics_as_errors():
                return cls._of(open_bundle(data))
        except BadBundle:
            raise
        except Exception as error:  # somebody else's files: what may be odd about them has no end
            reason = f"the tokenizer's bundle cannot be used: {type(error).__name__}: {error}"
            raise BadBundle(reason) from error

    @classmethod
    def _of(cls, bundle: Bundle) -> "Tokenizer":
        library = _load_library(bundle)
        config = bundle.json_object("tokenizer_config.json")
        special_tokens = special_token_texts(config, bundle.json_object("special_tokens_map.json"))
        add_missing_tokens(library, config, special_tokens)
        source = chat_template_source(bundle, config)
        tokenizer = cls(library, ChatTemplate(source, special_tokens) if source is not None else None)
        tokenizer.sampling_defaults = sampling_defaults(bundle.json_object("generation_config.json"))
        model_type = bundle.json_object("config.json").get("model_type")
        tokenizer.model_type = model_type if isinstance(model_type, str) else ""
        release_unused_memory()
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Entries of the vocabulary, added tokens included. A model's logits may have more columns than that."""
        return self._library.get_vocab_size(with_added_tokens=True)

    def token_bytes(self, num_ids: int) -> list[bytes | None] | None:
        """What each id adds to a text; see `decoders.token_bytes`."""
        return token_bytes(self._library, num_ids)

    def encode_part(self, text: str) -> list[int]:
        """The ids of a text from the middle of another."""
        return self._library.encode(text, add_special_tokens=False).ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's ids, with what the tokenizer puts at the ends of a text by itself (a begin token, say).

        Whatever the text spells out as a special token becomes that token. Runs without the interpreter's lock, so
        a worker thread may encode while the event loop goes on. InvalidRequest if the vocabulary has no way to
        write the text.
        """
        return self._encode(text, add_special_tokens, field="text")

    def spellings(self, word: str) -> list[list[int]]:
        """The ids of a word where it begins a text, and where it stands behind a space. None where it gives no id."""
        texts = (word, " " + word.lstrip())
        ids = [self._encode(text, add_special_tokens=False, field="sampling.bad_words") for text in texts]
        return [list(spelling) for spelling in dict.fromkeys(map(tuple, ids)) if spelling]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation as the model's template writes it, ending where the model's turn begins."""
        return self.encode_rendered_chat(self.render_chat(messages))

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the model's template writes it. InvalidRequest where there is none, or it refuses."""
        if self._chat_template is None:
            violation = FieldViolation("chat", "the model has no chat template; send text or token_ids instead")
            raise InvalidRequest(violation)
        return self._chat_template.render(messages)

    def encode_rendered_chat(self, text: str) -> list[int]:
        """The template writes the begin token where the model wants one; none is added to it."""
        return self._encode(text, add_special_tokens=False, field="chat")

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The ids' text as the tokenizer's own decoder gives it. Ids outside the vocabulary have no text."""
        return self._library.decode(ids, skip_special_tokens=skip_special_tokens)

    def new_decoder(self, skip_special_tokens: bool) -> IncrementalDecoder:
        """A decoder for one sequence, at its very beginning."""
        return self._decoder_makers[skip_special_tokens]()

    def lower_bound_tokens(self, text: str) -> int:
        """No fewer tokens than this come out of `encode`: lets an oversized prompt be refused before the work.

        0 where nothing is known, as with tokenizers that drop or merge parts of a text.
        """
        return self._bound.at_least(text)

    def lower_bound_of_bytes(self, num_bytes: int) -> int:
        """The same of any text that has so many bytes of UTF-8."""
        return self._bound.at_least_of_bytes(num_bytes)

    def _encode(self, text: str, add_special_tokens: bool, field: str) -> list[int]:
        try:
            # Of the library's ways to encode, this one computes no offsets: three times as fast.
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises nothing narrower
            reason = f"the model's tokenizer cannot encode it: {error}"
            raise InvalidRequest(FieldViolation(field, reason)) from error
        ids = encoding.ids
        if len(text) > _LARGE_TEXT_CHARS:
            del encoding
            release_unused_memory()
        return ids


def _load_library(bundle: Bundle) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_buffer(bundle.take("tokenizer.json"))
    except ValueError as error:
        raise BadBundle(f"tokenizer.json of the tokenizer's bundle cannot be loaded: {error}") from error
    # A file may carry the settings of somebody's training run: cutting or filling up prompts is not for us.
    library.no_truncation()
    library.no_padding()
    return library
