package link

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/strictjson"
)

const (
	testNode = "01hzx9k3m4p7q8r9s0t1v2w3xy"
	relayID  = "01HZXC0000000000000000SRV0"
	deviceID = "01HZXC0000000000000000DEV0"
	echoTool = "sysecho." + testNode + ".echo.invoke"
	testSub  = "sys." + testNode + ".metrics.subscribe"
)

// The frames of RFC-0005 §11, byte for byte: keys, order, no white space.
const (
	goldenCmd = `{"type":"cmd","msg_id":"01HZXC0000000000000000SRV0","payload":{"tool":"sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke","arguments":{"message":"ping"}}}`
	goldenAck = `{"type":"cmd_ack","msg_id":"01HZXC0000000000000000DEV0","in_reply_to":"01HZXC0000000000000000SRV0","payload":{"ok":true,"result":{"message":"ping","received_at_ms":1745236800012,"node_id":"01hzx9k3m4p7q8r9s0t1v2w3xy"}}}`

	goldenMetric = `{"type":"metric","msg_id":"01HZXC0000000000000000DEV0","payload":{"stream_id":"01HZXC0000000000000000STR0","seq":7,"sample":{"ts_ms":1745300000000}}}`
	goldenCancel = `{"type":"cmd_cancel","msg_id":"01HZXC0000000000000000SRV0","in_reply_to":"01HZXC0000000000000000DEV0","payload":{}}`
	goldenNo     = `{"type":"cmd_ack","msg_id":"01HZXC0000000000000000DEV0","in_reply_to":"01HZXC0000000000000000SRV0","payload":{"ok":false,"code":"E_INTERNAL","detail":"no <luck>"}}`
	goldenTraced = `{"type":"cmd","msg_id":"01HZXC0000000000000000SRV0","payload":{"tool":"sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke","arguments":{},"deadline_ms":500,"trace_id":"0af7651916cd43dd8448eb211c80319c"}}`
)

func TestGoldenFrames(t *testing.T) {
	result := `{"message":"ping","received_at_ms":1745236800012,"node_id":"` + testNode + `"}`
	tests := []struct {
		name string
		got  []byte
		want string
	}{
		{"cmd", AppendCmd(nil, relayID, echoTool, []byte(`{"message":"ping"}`), 0, "", Expiry{}), goldenCmd},
		{"cmd by Encode", Encode(TypeCmd, relayID, "", Cmd{Tool: echoTool, Arguments: strictjson.Raw(`{"message":"ping"}`)}), goldenCmd},
		{"cmd without arguments", AppendCmd(nil, relayID, echoTool, nil, 500, "0af7651916cd43dd8448eb211c80319c", Expiry{}), goldenTraced},
		{"ack", AppendAck(nil, deviceID, relayID, []byte(result)), goldenAck},
		{"ack by Encode", Encode(TypeCmdAck, deviceID, relayID, CmdAck{OK: true, Result: strictjson.Raw(result)}), goldenAck},
		{"refusal", Encode(TypeCmdAck, deviceID, relayID, CmdAck{Code: manifest.Internal, Detail: "no <luck>"}), goldenNo},
		{"metric", AppendMetric(nil, deviceID, "01HZXC0000000000000000STR0", 7, []byte(`{"ts_ms":1745300000000}`)), goldenMetric},
		{"metric by Encode", Encode(TypeMetric, deviceID, "", Metric{StreamID: "01HZXC0000000000000000STR0", Seq: 7, Sample: strictjson.Raw(`{"ts_ms":1745300000000}`)}), goldenMetric},
		{"cancel", Encode(TypeCmdCancel, relayID, deviceID, nil), goldenCancel},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if string(tt.got) != tt.want {
				t.Errorf("got\n%s\nwant\n%s", tt.got, tt.want)
			}
			if _, err := Decode(tt.got); err != nil {
				t.Errorf("Decode of the encoded frame: %v", err)
			}
		})
	}
}

func frame(typ, rest string) string {
	return `{"type":"` + typ + `","msg_id":"` + deviceID + `"` + rest + `}`
}

func TestDecode(t *testing.T) {
	deep := func(n int) string { return strings.Repeat(`{"a":`, n) + "1" + strings.Repeat("}", n) }
	padded := func(typ string, size int) string {
		f := frame(typ, `,"payload":{"x":"`)
		return f[:len(f)-1] + strings.Repeat("x", size-len(f)+1-3) + `"}}`
	}
	tests := []struct {
		name string
		in   string
		err  error // nil: good
	}{
		{"golden cmd", goldenCmd, nil},
		{"golden ack", goldenAck, nil},
		{"keys in another order", `{"payload":{},"msg_id":"` + deviceID + `","type":"hello"}`, nil},
		{"white space", " {\t\"type\" : \"hello\" ,\r\n \"msg_id\":\"" + deviceID + "\" , \"payload\" : { } } \n", nil},
		{"escaped key and value", `{"ty\u0070e":"hel\u006co","msg_id":"` + deviceID + `","payload":{}}`, nil},
		{"lower case id", `{"type":"hello","msg_id":"` + strings.ToLower(deviceID) + `","payload":{}}`, nil},
		{"16 levels", frame("hello", `,"payload":`+deep(15)), nil},

		{"17 levels", frame("hello", `,"payload":`+deep(16)), ErrBadFrame},
		{"empty", ``, ErrBadFrame},
		{"no object", `["hello"]`, ErrBadFrame},
		{"a string", `"hello"`, ErrBadFrame},
		{"two values", frame("hello", `,"payload":{}`) + `{}`, ErrBadFrame},
		{"trailing byte", frame("hello", `,"payload":{}`) + `x`, ErrBadFrame},
		{"cut", goldenAck[:len(goldenAck)-1], ErrBadFrame},
		{"wrong case of a key", `{"Type":"hello","msg_id":"` + deviceID + `","payload":{}}`, ErrBadFrame},
		{"wrong case of a type", frame("HELLO", `,"payload":{}`), ErrBadFrame},
		{"unknown type", frame("ping", `,"payload":{}`), ErrBadFrame},
		{"unknown key", frame("hello", `,"payload":{},"extra":1`), ErrBadFrame},
		{"duplicate key", frame("hello", `,"payload":{},"type":"cmd"`), ErrBadFrame},
		{"duplicate key, escaped", frame("hello", `,"payload":{},"ty\u0070e":"cmd"`), ErrBadFrame},
		{"duplicate key in the payload", frame("hello", `,"payload":{"a":1,"a":2}`), ErrBadFrame},
		{"bad UTF-8", frame("hello", `,"payload":{"a":"`+"\xff"+`"}`), ErrBadFrame},
		{"lone surrogate", frame("hello", `,"payload":{"a":"\ud800"}`), ErrBadFrame},
		{"infinite number", frame("hello", `,"payload":{"a":1e999}`), ErrBadFrame},
		{"NaN", frame("hello", `,"payload":{"a":NaN}`), ErrBadFrame},
		{"type missing", `{"msg_id":"` + deviceID + `","payload":{}}`, ErrBadFrame},
		{"type null", `{"type":null,"msg_id":"` + deviceID + `","payload":{}}`, ErrBadFrame},
		{"id missing", `{"type":"hello","payload":{}}`, ErrBadFrame},
		{"id short", `{"type":"hello","msg_id":"01HZXC","payload":{}}`, ErrBadFrame},
		{"id with a bad letter", `{"type":"hello","msg_id":"01HZXC0000000000000000DEVI","payload":{}}`, ErrBadFrame},
		{"id over the range", `{"type":"hello","msg_id":"81HZXC0000000000000000DEV0","payload":{}}`, ErrBadFrame},
		{"id a number", `{"type":"hello","msg_id":1,"payload":{}}`, ErrBadFrame},
		{"payload missing", frame("hello", ``), ErrBadFrame},
		{"payload null", frame("hello", `,"payload":null`), ErrBadFrame},
		{"payload an array", frame("hello", `,"payload":[]`), ErrBadFrame},
		{"reply missing", frame("cmd_ack", `,"payload":{}`), ErrBadFrame},
		{"reply missing in cancel", frame("cmd_cancel", `,"payload":{}`), ErrBadFrame},
		{"reply empty", frame("hello", `,"in_reply_to":"","payload":{}`), ErrBadFrame},
		{"reply null", frame("hello", `,"in_reply_to":null,"payload":{}`), ErrBadFrame},

		{"64 KiB", padded("hello", MaxFrame), nil},
		{"64 KiB and one", padded("hello", MaxFrame+1), ErrTooLarge},
		{"64 KiB of white space before it", strings.Repeat(" ", MaxFrame) + frame("hello", `,"payload":{}`), ErrTooLarge},
		{"announce of 256 KiB", padded("announce", MaxAnnounce), nil},
		{"announce of 256 KiB and one", padded("announce", MaxAnnounce+1), ErrTooLarge},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e, err := Decode([]byte(tt.in))
			if !errors.Is(err, tt.err) || (tt.err == nil) != (err == nil) {
				t.Fatalf("got %v, want %v", err, tt.err)
			}
			if err == nil && (e.MsgID != strings.ToUpper(e.MsgID) || e.InReplyTo != strings.ToUpper(e.InReplyTo)) {
				t.Errorf("ids are not upper case: %+v", e)
			}
		})
	}
}

func TestDecodeAck(t *testing.T) {
	tests := []struct {
		payload string
		want    *CmdAck // nil: refused
	}{
		{`{"ok":true,"result":{"a":[1,"}"]}}`, &CmdAck{OK: true, Result: strictjson.Raw(`{"a":[1,"}"]}`)}},
		{`{"result":null,"ok":true}`, &CmdAck{OK: true, Result: strictjson.Raw(`null`)}},
		{`{ "ok" : true , "result" : 5 }`, &CmdAck{OK: true, Result: strictjson.Raw(`5`)}},
		{`{"ok":true,"result":"\"}"}`, &CmdAck{OK: true, Result: strictjson.Raw(`"\"}"`)}},
		{`{"ok":false,"code":"E_INTERNAL"}`, &CmdAck{Code: manifest.Internal}},
		{`{"ok":false,"code":"E_INTERNAL","detail":"why"}`, &CmdAck{Code: manifest.Internal, Detail: "why"}},
		{`{}`, nil},
		{`{"result":{}}`, nil}, // ok missing
		{`{"code":"E_INTERNAL"}`, nil},
		{`{"ok":null,"code":"E_INTERNAL"}`, nil},
		{`{"ok":"true","result":{}}`, nil},
		{`{"ok":1,"result":{}}`, nil},
		{`{"ok":true}`, nil},
		{`{"ok":true,"result":{},"code":"E_INTERNAL"}`, nil},
		{`{"ok":true,"result":{},"detail":"x"}`, nil},
		{`{"ok":false,"code":"E_INTERNAL","result":{}}`, nil},
		{`{"ok":false,"code":"E_TIMEOUT"}`, nil}, // an alias that is never on the wire
		{`{"ok":false,"code":7}`, nil},
		{`{"ok":false,"code":"E_INTERNAL","detail":null}`, nil},
		{`{"ok":false,"code":"E_INTERNAL","detail":"` + strings.Repeat("x", 200) + `"}`, &CmdAck{Code: manifest.Internal, Detail: strings.Repeat("x", 200)}},
		{`{"ok":false,"code":"E_INTERNAL","detail":"` + strings.Repeat("x", 201) + `"}`, nil},
		{`{"ok":false,"code":"E_INTERNAL","detail":"\u001b[31m"}`, nil},
		{`{"OK":true,"result":{}}`, nil},
		{`{"ok":true,"result":{},"extra":1}`, nil},
	}
	for _, tt := range tests {
		e, err := Decode([]byte(frame("cmd_ack", `,"in_reply_to":"`+relayID+`","payload":`+tt.payload)))
		if err != nil {
			t.Fatalf("%s: %v", tt.payload, err)
		}
		got, err := e.decodeAck()
		switch {
		case tt.want == nil && !errors.Is(err, ErrBadFrame):
			t.Errorf("%s: got %+v, %v, want ErrBadFrame", tt.payload, got, err)
		case tt.want != nil && (err != nil || !reflect.DeepEqual(&got, tt.want)):
			t.Errorf("%s: got %+v, %v, want %+v", tt.payload, got, err, tt.want)
		}
	}
}

func TestDecodeMetric(t *testing.T) {
	const sid = "01HZXC0000000000000000STR0"
	tests := []struct {
		payload string
		good    bool
	}{
		{`{"stream_id":"` + sid + `","seq":1,"sample":{"a": 1}}`, true},
		{`{"sample":{},"seq":9007199254740993,"stream_id":"` + strings.ToLower(sid) + `"}`, true},
		{`{"stream_id":"` + sid + `","seq":0,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":-1,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":1.0,"sample":{}}`, true}, // an integer to JSON Schema
		{`{"stream_id":"` + sid + `","seq":5e3,"sample":{}}`, true},
		{`{"stream_id":"` + sid + `","seq":1.5,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":1e-3,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":1e300,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":true,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":99999999999999999999,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":"1","sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":1}`, false},
		{`{"stream_id":"` + sid + `","sample":{}}`, false},
		{`{"seq":1,"sample":{}}`, false},
		{`{"stream_id":"","seq":1,"sample":{}}`, false},
		{`{"stream_id":"` + sid + `","seq":1,"sample":[]}`, false},
		{`{"stream_id":"` + sid + `","seq":1,"sample":null}`, false},
		{`{"stream_id":"` + sid + `","seq":1,"sample":{},"x":1}`, false},
		{"{\"stream_id\":\"" + sid + "\",\"seq\":1,\"sample\":{\n}}", false}, // would break the line of an event stream
		{"{\"stream_id\":\"" + sid + "\",\"seq\":1,\"sample\":{\r}}", false},
		{"{\"stream_id\":\"" + sid + "\",\"seq\":1,\n\"sample\":{}}", true}, // a line break outside the sample
	}
	for _, tt := range tests {
		e, err := Decode([]byte(frame("metric", `,"payload":`+tt.payload)))
		if err != nil {
			t.Fatalf("%s: %v", tt.payload, err)
		}
		m, err := e.decodeMetric()
		if tt.good != (err == nil) || (err != nil && !errors.Is(err, ErrBadFrame)) {
			t.Errorf("%s: got %+v, %v, want good %v", tt.payload, m, err, tt.good)
		}
		if err == nil && (m.StreamID != sid || m.Seq < 1 || m.Sample[0] != '{') {
			t.Errorf("%s: got %+v", tt.payload, m)
		}
	}
}

func TestNewID(t *testing.T) {
	seen := make(map[string]bool)
	for range 10000 {
		id := NewID()
		if u, ok := manifest.ParseULID(id); !ok || u != id || seen[id] {
			t.Fatalf("%q is no new ULID in upper case", id)
		}
		seen[id] = true
	}
}

// reference is the envelope as the strict decoder alone would read it.
type reference struct {
	Type      strictjson.Raw `json:"type"`
	MsgID     strictjson.Raw `json:"msg_id"`
	InReplyTo strictjson.Raw `json:"in_reply_to"`
	Payload   strictjson.Raw `json:"payload"`
}

// FuzzDecode: Decode does not panic; what it accepts survives encoding and decoding; the
// parts are those that the strict decoder finds.
func FuzzDecode(f *testing.F) {
	for _, s := range []string{goldenCmd, goldenAck, goldenNo, goldenMetric, goldenCancel, goldenTraced,
		frame("announce", `,"payload":{"manifest_version":1,"manifest_sha256":"","capabilities":[{}]}`),
		strings.Replace(goldenMetric, `"seq":7`, `"seq":7.0`, 1), strings.Replace(goldenMetric, `"seq":7`, `"seq":7e0`, 1),
		`{"ty\u0070e":"hello","msg_id":"` + deviceID + `","payload":{"a":"\"}{\\"}}`,
		"{\n \"type\": \"error\", \"msg_id\": \"" + deviceID + "\",\t\"payload\": { \"a\" : [ 1 , {} , null ] } }",
		`{"type":"hello","msg_id":"` + deviceID + `","payload":{}}x`, `[]`, `{`, `"`, `{"type":1}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		before := bytes.Clone(in)
		e, err := Decode(in)
		if !bytes.Equal(in, before) {
			t.Fatal("Decode wrote into its input")
		}
		var ref reference
		refErr := strictjson.Unmarshal(in, &ref)
		if err != nil {
			if !errors.Is(err, ErrBadFrame) && !errors.Is(err, ErrTooLarge) {
				t.Fatalf("unnamed error %v", err)
			}
			return
		}
		if refErr != nil {
			t.Fatalf("accepted what the strict decoder refuses: %v", refErr)
		}
		var typ string
		if json.Unmarshal(ref.Type, &typ) != nil || typ != e.Type || !bytes.Equal(ref.Payload, e.Payload) {
			t.Fatalf("got %+v, the strict decoder has %s %s", e, ref.Type, ref.Payload)
		}
		again, err := Decode(Encode(e.Type, e.MsgID, e.InReplyTo, strictjson.Raw(e.Payload)))
		if len(in) < MaxFrame && (err != nil || fmt.Sprint(again) != fmt.Sprint(e)) {
			t.Fatalf("printed and parsed: %+v, %v, want %+v", again, err, e)
		}
		fuzzPayload(t, &e)
	})
}

// fuzzPayload compares the payload decoders written by hand with the strict decoder.
func fuzzPayload(t *testing.T, e *Envelope) {
	if a, err := e.decodeAck(); err == nil {
		var want CmdAck
		if err := e.Decode(&want); err != nil || fmt.Sprint(a) != fmt.Sprint(want) {
			t.Fatalf("ack %+v, the strict decoder has %+v, %v", a, want, err)
		}
	}
	if m, err := e.decodeMetric(); err == nil {
		var want Metric
		if err := e.Decode(&want); err != nil {
			want.Seq, err = m.Seq, e.Decode(&struct { // 7.0 is a whole number here
				StreamID *string         `json:"stream_id"`
				Seq      float64         `json:"seq"`
				Sample   *strictjson.Raw `json:"sample"`
			}{&want.StreamID, 0, &want.Sample})
			if err != nil {
				t.Fatalf("metric %+v, the strict decoder has %v", m, err)
			}
		}
		if m.Seq != want.Seq || !bytes.Equal(m.Sample, want.Sample) || m.StreamID != strings.ToUpper(want.StreamID) {
			t.Fatalf("metric %+v, the strict decoder has %+v", m, want)
		}
	}
}
