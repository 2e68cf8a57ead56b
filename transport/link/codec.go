package link

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/oklog/ulid/v2"

	"agentctl/manifest"
	"agentctl/strictjson"
)

// Envelope is one message of the link.
type Envelope struct {
	Type      string
	MsgID     string // upper case
	InReplyTo string // upper case; "" if there is none
	Payload   []byte // a JSON object; a part of the frame
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
	if err := strictjson.Check(frame); err != nil {
		return e, fmt.Errorf("%w: %w", ErrBadFrame, err)
	}
	size := len(frame) // with the white space around it
	frame = trimSpace(frame)
	if frame[0] != '{' {
		return e, badFrame("no JSON object")
	}
	w := walk(frame)
	for name, value, more := w.next(); more; name, value, more = w.next() {
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
			return e, badFrame("an unknown key, an unknown type, an id that is no ULID or a payload that is no object")
		}
	}
	switch {
	case e.Type == "", e.MsgID == "", e.Payload == nil:
		return e, badFrame("type, msg_id or payload is missing")
	case size > MaxFrame && e.Type != TypeAnnounce:
		return e, ErrTooLarge
	case e.InReplyTo == "" && requiresReplyTo(e.Type):
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

// decodeAck decodes the payload of a cmd_ack; Result is a part of the frame. By hand, since a
// caller waits for it.
func (e *Envelope) decodeAck() (a CmdAck, err error) {
	told := false
	w := walk(e.Payload)
	for name, value, more := w.next(); more; name, value, more = w.next() {
		ok := true
		switch string(name) {
		case "ok":
			told, a.OK = true, value[0] == 't'
			ok = value[0] == 't' || value[0] == 'f'
		case "result":
			a.Result = value
		case "code":
			var s []byte
			s, ok = parseString(value)
			a.Code = manifest.Code(s)
		case "detail":
			var s []byte
			s, ok = parseString(value)
			a.Detail = string(s)
		default:
			ok = false
		}
		if !ok {
			return a, badFrame("payload of cmd_ack")
		}
	}
	if !told || !a.valid() {
		return a, badFrame("payload of cmd_ack")
	}
	return a, nil
}

// valid tells whether a is {ok:true, result} or {ok:false, code, detail?}.
func (a *CmdAck) valid() bool {
	if a.OK {
		return len(a.Result) > 0 && a.Code == "" && a.Detail == ""
	}
	return len(a.Result) == 0 && a.Code.Valid() && len(a.Detail) <= maxDetail && printableASCII(a.Detail) == a.Detail
}

// decodeMetric decodes the payload of a metric; Sample is a part of the frame. The sample is
// passed on as it stands, so it has to be one line.
func (e *Envelope) decodeMetric() (m Metric, err error) {
	w := walk(e.Payload)
	for name, value, more := w.next(); more; name, value, more = w.next() {
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
			return m, badFrame("payload of metric")
		}
	}
	if m.StreamID == "" || m.Seq < 1 || m.Sample == nil {
		return m, badFrame("payload of metric")
	}
	return m, nil
}

// parseInteger reads a whole number as JSON Schema knows it: 7, 7.0 and 7e0 are the same.
func parseInteger(value []byte) (int64, bool) {
	if n, err := strconv.ParseInt(string(value), 10, 64); err == nil {
		return n, true
	}
	f, err := strconv.ParseFloat(string(value), 64)
	return int64(f), err == nil && f == math.Trunc(f) && math.Abs(f) < 1<<53
}

var messageTypes = [...]string{TypeHello, TypeAuth, TypeAuthOK, TypeAnnounce, TypeAnnounceAck, TypeMetric,
	TypeCmd, TypeCmdAck, TypeCmdCancel, TypeStreamEnd, TypeError, TypeEvent}

func parseType(value []byte) (string, bool) {
	s, _ := parseString(value)
	for _, t := range messageTypes {
		if string(s) == t {
			return t, true
		}
	}
	return "", false
}

func parseID(value []byte) (string, bool) {
	s, _ := parseString(value)
	if len(s) != manifest.ULIDLen {
		return "", false
	}
	return manifest.ParseULID(string(s))
}

func requiresReplyTo(t string) bool { return t == TypeCmdAck || t == TypeCmdCancel }

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
	b = appendHeader(b, typ, msgID, inReplyTo)
	b = append(b, raw...)
	return append(b, '}')
}

func appendHeader(b []byte, typ, msgID, inReplyTo string) []byte {
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

var noArgs = []byte("{}")

// AppendCmd appends a cmd frame; it is Encode by hand, since a call waits for it. args
// is a JSON object, empty for {}.
func AppendCmd(b []byte, msgID, tool string, args []byte, deadlineMS int64, traceID string) []byte {
	b = appendHeader(b, TypeCmd, msgID, "")
	b = append(b, `{"tool":"`...)
	b = append(b, tool...) // checked name: needs no escaping
	b = append(b, `","arguments":`...)
	if len(args) == 0 {
		args = noArgs
	}
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
	b = appendHeader(b, TypeCmdAck, msgID, inReplyTo)
	b = append(b, `{"ok":true,"result":`...)
	b = append(b, result...)
	return append(b, `}}`...)
}

// AppendMetric appends a metric frame.
func AppendMetric(b []byte, msgID, streamID string, seq int64, sample []byte) []byte {
	b = appendHeader(b, TypeMetric, msgID, "")
	b = append(b, `{"stream_id":"`...)
	b = append(b, streamID...)
	b = append(b, `","seq":`...)
	b = strconv.AppendInt(b, seq, 10)
	b = append(b, `,"sample":`...)
	b = append(b, sample...)
	return append(b, `}}`...)
}

// NewID mints the id of a message: a ULID in upper case. It is unique, not secret, so
// its random part comes from the process's own generator, seeded by the system.
func NewID() string {
	var u ulid.ULID
	_ = u.SetTime(uint64(time.Now().UnixMilli())) // in range for 8,000 years
	binary.BigEndian.PutUint64(u[6:], rand.Uint64())
	binary.BigEndian.PutUint16(u[14:], uint16(rand.Uint32()))
	return u.String()
}

// maxDetail bounds CmdAck.Detail.
const maxDetail = 200

// printableASCII keeps at most maxDetail printable ASCII characters.
func printableASCII(s string) string {
	clean := len(s) <= maxDetail
	for i := 0; i < len(s) && clean; i++ {
		clean = s[i] >= 0x20 && s[i] <= 0x7e
	}
	if clean {
		return s
	}
	b := make([]byte, 0, min(len(s), maxDetail))
	for i := 0; i < len(s) && len(b) < maxDetail; i++ {
		if s[i] >= 0x20 && s[i] <= 0x7e {
			b = append(b, s[i])
		}
	}
	return string(b)
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
