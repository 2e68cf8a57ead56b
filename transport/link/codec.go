package link

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// Envelope is one decoded message of the link.
type Envelope struct {
	Type      string
	MsgID     string // upper case
	InReplyTo string // upper case; "" if there is none
	Payload   []byte // a JSON object; a part of the frame
}

// codedError is an error for which this end sends a specific close code.
type codedError struct {
	text   string
	code   int
	reason string
}

// Error is the text for logs; the peer gets code and reason.
func (e *codedError) Error() string { return e.text }

var (
	// ErrTooLarge is a frame over its size limit.
	ErrTooLarge error = &codedError{"link: frame too large", CloseTooLarge, "too_large"}
	// ErrBadFrame is a frame that is not an envelope of this protocol, or that came in the
	// wrong state.
	ErrBadFrame error = &codedError{"link: bad frame", CloseBadFrame, "bad_frame"}
)

// Decode parses one frame strictly: known keys and types only, each key once, white
// space counted against the size limits.
func Decode(frame []byte) (Envelope, error) {
	var e Envelope
	if len(frame) > MaxAnnounce {
		return e, ErrTooLarge
	}
	if err := strictjson.Check(frame); err != nil {
		return e, fmt.Errorf("%w: %w", ErrBadFrame, err)
	}
	size := len(frame) // with the white space around the object
	frame = strictjson.SkipSpace(frame)
	if frame[0] != '{' {
		return e, badFrame("not a JSON object")
	}
	for name, value := range strictjson.Object(frame).Members {
		ok := false
		switch string(name) {
		case "type":
			e.Type, ok = parseType(value)
		case "msg_id":
			e.MsgID, ok = parseID(value)
		case "in_reply_to":
			e.InReplyTo, ok = parseID(value)
		case "payload":
			e.Payload, ok = value, value[0] == '{'
		}
		if !ok {
			return e, badFrame("an unknown key, an unknown type, an id that is not a ULID or a payload that is not an object")
		}
	}
	switch {
	case e.Type == "", e.MsgID == "", e.Payload == nil:
		return e, badFrame("type, msg_id or payload is missing")
	case size > MaxFrame && e.Type != TypeAnnounce:
		return e, ErrTooLarge
	case e.InReplyTo == "" && (e.Type == TypeCmdAck || e.Type == TypeCmdCancel):
		return e, badFrame("in_reply_to is missing")
	}
	return e, nil
}

func badFrame(what string) error { return fmt.Errorf("%w: %s", ErrBadFrame, what) }

// Decode decodes the payload of e strictly into v, which keeps no part of the frame.
func (e *Envelope) Decode(v any) error {
	if err := strictjson.Unmarshal(e.Payload, v); err != nil {
		return fmt.Errorf("%w: payload of %s: %w", ErrBadFrame, e.Type, err)
	}
	return nil
}

// Errors of the payloads that are decoded by hand, made once: a device that floods the
// relay with bad frames should cost little.
var errBadAck, errBadMetric = badFrame("payload of cmd_ack"), badFrame("payload of metric")

// decodeAck decodes the payload of a cmd_ack: {ok:true, result} or {ok:false, code,
// detail?}. Result is a part of the frame. It replaces Decode, which uses reflection,
// because a caller waits for the answer.
func (e *Envelope) decodeAck() (a CmdAck, err error) {
	hasOK := false
	for name, value := range strictjson.Object(e.Payload).Members {
		valid := true
		switch string(name) {
		case "ok":
			hasOK, a.OK = true, value[0] == 't'
			valid = value[0] == 't' || value[0] == 'f'
		case "result":
			a.Result = value
		case "code":
			var s []byte
			s, valid = strictjson.Text(value)
			a.Code = manifest.Code(s)
		case "detail":
			var s []byte
			s, valid = strictjson.Text(value)
			a.Detail = string(s)
		default:
			valid = false
		}
		if !valid {
			return a, errBadAck
		}
	}
	valid := hasOK && (len(a.Result) > 0) == a.OK && printableASCII(a.Detail) == a.Detail
	if a.OK {
		valid = valid && a.Code == "" && a.Detail == ""
	} else {
		valid = valid && a.Code.Valid()
	}
	if !valid {
		return a, errBadAck
	}
	return a, nil
}

// decodeMetric decodes the payload of a metric; Sample is a part of the frame. The relay
// forwards the sample unchanged as one line of SSE, so it must not contain a line break.
func (e *Envelope) decodeMetric() (m Metric, err error) {
	for name, value := range strictjson.Object(e.Payload).Members {
		ok := false
		switch string(name) {
		case "stream_id":
			m.StreamID, ok = parseID(value)
		case "seq":
			m.Seq, ok = parseInteger(value)
		case "sample":
			m.Sample, ok = value, value[0] == '{' && !bytes.ContainsAny(value, "\r\n")
		}
		if !ok {
			return m, errBadMetric
		}
	}
	if m.StreamID == "" || m.Seq < 1 || m.Sample == nil {
		return m, errBadMetric
	}
	return m, nil
}

// parseInteger reads a whole number as JSON Schema defines it: 7, 7.0 and 7e0 are equal.
func parseInteger(value []byte) (int64, bool) {
	if n, err := strconv.ParseInt(string(value), 10, 64); err == nil {
		return n, true
	}
	var n int64
	err := strictjson.Unmarshal(value, &n)
	return n, err == nil
}

var messageTypes = [...]string{TypeHello, TypeAuth, TypeAuthOK, TypeAnnounce, TypeAnnounceAck, TypeMetric,
	TypeCmd, TypeCmdAck, TypeCmdCancel, TypeStreamEnd, TypeError, TypeEvent}

// parseType returns the constant that equals the value, so that nothing is allocated.
func parseType(value []byte) (string, bool) {
	s, _ := strictjson.Text(value)
	for _, t := range messageTypes {
		if string(s) == t {
			return t, true
		}
	}
	return "", false
}

// parseID returns a ULID in upper case.
func parseID(value []byte) (string, bool) {
	s, _ := strictjson.Text(value)
	return manifest.ParseULID(string(s))
}

// Encode makes one frame; inReplyTo may be empty, and a nil payload is {}. It panics for
// a payload that cannot be encoded, which the payload types of this package never are.
func Encode(typ, msgID, inReplyTo string, payload any) []byte {
	raw, isRaw := payload.(strictjson.Raw)
	switch {
	case payload == nil:
		raw = emptyObject
	case !isRaw:
		raw = encodeJSON(payload)
	}
	b := make([]byte, 0, len(raw)+len(typ)+2*manifest.ULIDLen+64)
	b = appendHeader(b, typ, msgID, inReplyTo)
	b = append(b, raw...)
	return append(b, '}')
}

// appendHeader appends a frame up to its payload. Types and ids need no escaping.
func appendHeader(b []byte, typ, msgID, inReplyTo string) []byte {
	b = appendStrings(b, `{"type":"`, typ, `","msg_id":"`, msgID)
	if inReplyTo != "" {
		b = appendStrings(b, `","in_reply_to":"`, inReplyTo)
	}
	return append(b, `","payload":`...)
}

// appendStrings appends the parts without building a string of them first.
func appendStrings(b []byte, parts ...string) []byte {
	for _, s := range parts {
		b = append(b, s...)
	}
	return b
}

var emptyObject = []byte("{}")

// AppendCmd appends a cmd frame. It gives the same bytes as Encode without reflection,
// because a caller waits for the answer. args is a JSON object, empty for {}; deadlineMS,
// traceID and expiry are left out when they are zero. A valid tool name needs no escaping.
func AppendCmd(b []byte, msgID, tool string, args []byte, deadlineMS int64, traceID string, expiry Expiry) []byte {
	b = appendHeader(b, TypeCmd, msgID, "")
	b = appendStrings(b, `{"tool":"`, tool, `","arguments":`)
	if len(args) == 0 {
		args = emptyObject
	}
	b = append(b, args...)
	if deadlineMS > 0 {
		b = strconv.AppendInt(append(b, `,"deadline_ms":`...), deadlineMS, 10)
	}
	if traceID != "" {
		b = appendStrings(b, `,"trace_id":"`, traceID, `"`)
	}
	if expiry != (Expiry{}) {
		b = strconv.AppendInt(append(b, `,"issued_at_ms":`...), expiry.IssuedAtMS, 10)
		b = strconv.AppendInt(append(b, `,"expires_in_ms":`...), expiry.ExpiresInMS, 10)
	}
	return append(b, `}}`...)
}

// AppendAck appends a cmd_ack frame with a result, as AppendCmd.
func AppendAck(b []byte, msgID, inReplyTo string, result []byte) []byte {
	b = appendHeader(b, TypeCmdAck, msgID, inReplyTo)
	b = append(append(b, `{"ok":true,"result":`...), result...)
	return append(b, `}}`...)
}

// AppendMetric appends a metric frame, as AppendCmd.
func AppendMetric(b []byte, msgID, streamID string, seq int64, sample []byte) []byte {
	b = appendHeader(b, TypeMetric, msgID, "")
	b = appendStrings(b, `{"stream_id":"`, streamID, `","seq":`)
	b = strconv.AppendInt(b, seq, 10)
	b = append(append(b, `,"sample":`...), sample...)
	return append(b, `}}`...)
}

// NewID makes the id of a message: a ULID in upper case. It must be unique but not
// unpredictable, so the random part comes from math/rand, which the runtime seeds.
func NewID() string {
	var u ulid.ULID
	_ = u.SetTime(uint64(time.Now().UnixMilli())) // in range until the year 10889
	binary.BigEndian.PutUint64(u[6:], rand.Uint64())
	binary.BigEndian.PutUint16(u[14:], uint16(rand.Uint32()))
	return u.String()
}

// maxDetail bounds CmdAck.Detail, characters.
const maxDetail = 200

// printableASCII drops all other characters from s and cuts it to maxDetail. It is for
// text of the peer that appears in an error or a log.
func printableASCII(s string) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s)
	return s[:min(len(s), maxDetail)]
}

// encodeJSON encodes one of this package's own types, which always encode. Unlike
// json.Marshal it does not escape <, > and &, which would change announced bytes.
func encodeJSON(v any) []byte {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		panic("link: encode: " + err.Error())
	}
	return bytes.TrimRight(buf.Bytes(), "\n")
}
