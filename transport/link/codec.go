package link

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"agentctl/manifest"
	"agentctl/transport/strictjson"
)

// Envelope is one message of the link.
type Envelope struct {
	Type      string         `json:"type"`
	MsgID     string         `json:"msg_id"`
	InReplyTo string         `json:"in_reply_to,omitempty"`
	Payload   strictjson.Raw `json:"payload"`
}

var (
	// ErrTooLarge is a frame over its size limit.
	ErrTooLarge = errors.New("link: frame too large")
	// ErrBadFrame is a frame that is no envelope of this protocol.
	ErrBadFrame = errors.New("link: bad frame")
)

// Decode parses one frame strictly. MsgID and InReplyTo come back in upper case.
func Decode(frame []byte) (Envelope, error) {
	var e Envelope
	if len(frame) > MaxAnnounce {
		return e, ErrTooLarge
	}
	if err := strictjson.Unmarshal(frame, &e); err != nil {
		return e, fmt.Errorf("%w: %w", ErrBadFrame, err)
	}
	if !knownType(e.Type) {
		return e, fmt.Errorf("%w: unknown type", ErrBadFrame)
	}
	if len(frame) > MaxFrame && e.Type != TypeAnnounce {
		return e, ErrTooLarge
	}
	var ok bool
	if e.MsgID, ok = manifest.ParseULID(e.MsgID); !ok {
		return e, fmt.Errorf("%w: msg_id is no ULID", ErrBadFrame)
	}
	if e.InReplyTo != "" {
		if e.InReplyTo, ok = manifest.ParseULID(e.InReplyTo); !ok {
			return e, fmt.Errorf("%w: in_reply_to is no ULID", ErrBadFrame)
		}
	}
	if needsReply(e.Type) && e.InReplyTo == "" {
		return e, fmt.Errorf("%w: in_reply_to is missing", ErrBadFrame)
	}
	if len(e.Payload) == 0 || e.Payload[0] != '{' {
		return e, fmt.Errorf("%w: payload is no object", ErrBadFrame)
	}
	return e, nil
}

// Payload decodes the payload of e strictly into v.
func (e *Envelope) Decode(v any) error {
	if err := strictjson.Unmarshal(e.Payload, v); err != nil {
		return fmt.Errorf("%w: payload of %s: %w", ErrBadFrame, e.Type, err)
	}
	return nil
}

func knownType(t string) bool {
	switch t {
	case TypeHello, TypeAuth, TypeAuthOK, TypeAnnounce, TypeAnnounceAck, TypeMetric, TypeCmd,
		TypeCmdAck, TypeCmdCancel, TypeStreamEnd, TypeError:
		return true
	}
	return false
}

func needsReply(t string) bool { return t == TypeCmdAck || t == TypeCmdCancel }

// Encode makes one frame. inReplyTo may be empty. The payload types of this package
// always encode.
func Encode(typ, msgID, inReplyTo string, payload any) []byte {
	var raw []byte
	switch p := payload.(type) {
	case strictjson.Raw:
		raw = p
	case nil:
		raw = []byte("{}")
	default:
		raw = encodeJSON(payload)
	}
	b := make([]byte, 0, len(raw)+len(typ)+2*manifest.ULIDLen+64)
	b = appendHead(b, typ, msgID, inReplyTo)
	b = append(b, raw...)
	return append(b, '}')
}

func appendHead(b []byte, typ, msgID, inReplyTo string) []byte {
	b = append(b, `{"type":"`...)
	b = append(b, typ...)
	b = append(b, `","msg_id":"`...)
	b = append(b, msgID...)
	if inReplyTo != "" {
		b = append(b, `","in_reply_to":"`...)
		b = append(b, inReplyTo...)
	}
	return append(b, `","payload":`...)
}

// AppendCmd appends a cmd frame; it is Encode by hand, since a call waits for it.
func AppendCmd(b []byte, msgID, tool string, args []byte, deadlineMS int64, traceID string) []byte {
	b = appendHead(b, TypeCmd, msgID, "")
	b = append(b, `{"tool":"`...)
	b = append(b, tool...) // checked name: needs no escaping
	b = append(b, `","arguments":`...)
	b = append(b, args...)
	if deadlineMS > 0 {
		b = append(b, `,"deadline_ms":`...)
		b = strconv.AppendInt(b, deadlineMS, 10)
	}
	if traceID != "" {
		b = append(b, `,"trace_id":"`...)
		b = append(b, traceID...)
		b = append(b, '"')
	}
	return append(b, `}}`...)
}

// AppendAck appends a cmd_ack frame with a result.
func AppendAck(b []byte, msgID, inReplyTo string, result []byte) []byte {
	b = appendHead(b, TypeCmdAck, msgID, inReplyTo)
	b = append(b, `{"ok":true,"result":`...)
	b = append(b, result...)
	return append(b, `}}`...)
}

// AppendMetric appends a metric frame.
func AppendMetric(b []byte, msgID, streamID string, seq int64, sample []byte) []byte {
	b = appendHead(b, TypeMetric, msgID, "")
	b = append(b, `{"stream_id":"`...)
	b = append(b, streamID...)
	b = append(b, `","seq":`...)
	b = strconv.AppendInt(b, seq, 10)
	b = append(b, `,"sample":`...)
	b = append(b, sample...)
	return append(b, `}}`...)
}

// encodeJSON encodes one of this package's own types, which cannot fail.
func encodeJSON(v any) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("link: encode: " + err.Error())
	}
	return bytes.TrimRight(buf.Bytes(), "\n")
}
