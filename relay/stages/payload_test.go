package stages_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

func TestSign(t *testing.T) {
	p := &plugin{name: "p", read: `{"r":1}`, call: func(*kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(`{"b":1.50,"a":9007199254740993}`), Meta: json.RawMessage(`{"mine":1}`)}, nil
	}}
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, p)
	set(t, m, "sign", `{"kid":"one","key_file":"k1","accept":[{"kid":"two","key_file":"k2"}]}`)
	k1, k2 := []byte(strings.Repeat("1", 32)), []byte(strings.Repeat("2", 40))

	var meta struct {
		Mine int              `json:"mine"`
		Sig  stages.Signature `json:"agentctl/sig"`
	}
	answer := func(r *kernel.Request) *kernel.Result {
		t.Helper()
		res, err := k.Call(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(res.Meta, &meta); err != nil || meta.Sig.Kid != "one" || meta.Sig.Alg != stages.Algorithm {
			t.Fatalf("_meta %s, %v", res.Meta, err)
		}
		return res
	}
	r := request(agent(), "p.do", `{}`, `{"agentctl/nonce":"n1"}`)
	res := answer(r)
	first := meta.Sig
	if answer(request(agent(), "p.do", `{}`, `{"agentctl/nonce":"n1"}`)); meta.Sig != first || meta.Mine != 1 {
		t.Errorf("a repetition is signed otherwise: %+v", meta)
	}
	// What the client has may be written otherwise, and verifies; any change does not.
	good := stages.Message{Kind: "result", Tool: "p.do", Nonce: "n1", Structured: json.RawMessage(`{ "a": 9007199254740993, "b": 15e-1 }`)}
	if err := good.Verify(first, k1); err != nil {
		t.Errorf("the client's form: %v", err)
	}
	tampered := map[string]func(*stages.Message, *stages.Signature){
		"a value": func(m *stages.Message, _ *stages.Signature) {
			m.Structured = json.RawMessage(`{"b":1.51,"a":9007199254740993}`)
		},
		"a digit": func(m *stages.Message, _ *stages.Signature) {
			m.Structured = json.RawMessage(`{"b":1.5,"a":9007199254740992}`)
		},
		"a member":   func(m *stages.Message, _ *stages.Signature) { m.Structured = json.RawMessage(`{"b":1.5}`) },
		"content":    func(m *stages.Message, _ *stages.Signature) { m.Content = []json.RawMessage{json.RawMessage(`{}`)} },
		"a failure":  func(m *stages.Message, _ *stages.Signature) { m.IsError = true },
		"the tool":   func(m *stages.Message, _ *stages.Signature) { m.Tool = "p.other" },
		"the nonce":  func(m *stages.Message, _ *stages.Signature) { m.Nonce = "n2" },
		"the kind":   func(m *stages.Message, _ *stages.Signature) { m.Kind = "request" },
		"the sum":    func(_ *stages.Message, s *stages.Signature) { s.Sig = "00" + s.Sig[2:] },
		"half a sum": func(_ *stages.Message, s *stages.Signature) { s.Sig = s.Sig[:32] },
		"no sum":     func(_ *stages.Message, s *stages.Signature) { s.Sig = "" },
		"the alg":    func(_ *stages.Message, s *stages.Signature) { s.Alg = "none" },
	}
	for name, change := range tampered {
		msg, sig := good, first
		change(&msg, &sig)
		if err := msg.Verify(sig, k1); !errors.Is(err, stages.ErrSignature) {
			t.Errorf("%s changed: %v", name, err)
		}
	}
	if err := good.Verify(first, k2); !errors.Is(err, stages.ErrSignature) {
		t.Errorf("another key: %v", err)
	}
	if err := stages.ResultMessage(r, res).Verify(first, k1); err != nil {
		t.Errorf("as it was sent: %v", err)
	}

	// Reads are signed, streams and errors are not.
	rd := &kernel.Request{Method: kernel.MethodRead, Caller: agent(), URI: "mcp://p/all.json"}
	if err := stages.ResultMessage(rd, answer(rd)).Verify(meta.Sig, k1); err != nil {
		t.Errorf("a read: %v", err)
	}
	changed := stages.ResultMessage(rd, &kernel.Result{Data: []byte(`{"r":2}`)})
	if err := changed.Verify(meta.Sig, k1); !errors.Is(err, stages.ErrSignature) {
		t.Errorf("a changed read: %v", err)
	}
	d := &device{node: "01hzx9k3m4p7q8r9s0t1v2w3xy"}
	if err := k.Load(d, false); err != nil {
		t.Fatal(err)
	}
	if res, err := k.Call(t.Context(), &kernel.Request{Caller: agent(), Tool: d.stream(), Stream: true}); err != nil || res.Stream != (stream{}) || res.Meta != nil {
		t.Errorf("a stream: %+v, %v", res, err)
	}

	// Requests.
	sign := func(r *kernel.Request, kid string, key []byte) *kernel.Request {
		sig, err := stages.RequestMessage(r).Sign(kid, key)
		if err != nil {
			t.Fatal(err)
		}
		meta, _ := json.Marshal(map[string]any{stages.MetaSignature: sig})
		r.Meta = meta
		return r
	}
	for _, require := range []bool{false, true} {
		set(t, m, "sign", fmt.Sprintf(`{"kid":"one","key_file":"k1","accept":[{"kid":"two","key_file":"k2"}],"require":%v}`, require))
		reordered := sign(request(agent(), "p.do", `{"x":1,"y":[2.0]}`, ""), "two", k2)
		reordered.Arguments = json.RawMessage(`{"y": [2], "x": 1}`)
		changed := sign(request(agent(), "p.do", `{"x":1}`, ""), "two", k2)
		changed.Arguments = json.RawMessage(`{"x":2}`)
		moved := sign(request(agent(), "p.do", `{"x":1}`, ""), "two", k2)
		moved.Tool = "p.other"
		unsigned := ""
		if require {
			unsigned = "unsigned"
		}
		for _, tt := range []struct {
			name   string
			req    *kernel.Request
			denied string
		}{
			{"signed", sign(request(agent(), "p.do", `{"x":1}`, ""), "one", k1), ""},
			{"signed with an accepted key", sign(request(agent(), "p.do", ``, ""), "two", k2), ""},
			{"written otherwise", reordered, ""},
			{"a read", sign(&kernel.Request{Method: kernel.MethodRead, Caller: agent(), URI: "mcp://p/all.json"}, "one", k1), ""},
			{"changed", changed, "signature"},
			{"for another tool", moved, "signature"},
			{"an unknown key", sign(request(agent(), "p.do", ``, ""), "three", k1), "signature"},
			{"another's key", sign(request(agent(), "p.do", ``, ""), "one", k2), "signature"},
			{"no signature at all", request(agent(), "p.do", ``, `{"agentctl/sig":5}`), "signature"},
			{"unsigned", request(agent(), "p.do", `{"x":1}`, ""), unsigned},
		} {
			before := len(p.seen)
			_, err := k.Call(t.Context(), tt.req)
			if tt.denied == "" && err != nil {
				t.Errorf("%s (require %v): %v", tt.name, require, err)
			}
			if tt.denied != "" {
				wantCode(t, tt.name, err, manifest.SafetyDenied, tt.denied)
				if len(p.seen) != before {
					t.Errorf("%s: reached the plugin", tt.name)
				}
			}
		}
	}
	for _, w := range m.List() { // the key is nowhere to be seen
		if strings.Contains(string(w.Config), "1111") {
			t.Errorf("config %s", w.Config)
		}
	}
}

func TestCompress(t *testing.T) {
	long := `{"rows":[` + strings.Repeat(`{"cpu_pct":12.5,"mem_bytes":1048576},`, 200) + `{}]}`
	noise := make([]byte, 4000)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range noise {
		noise[i] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_"[random.IntN(64)]
	}
	p := &plugin{name: "p", read: long}
	var given kernel.Result
	p.call = func(*kernel.Request) (*kernel.Result, error) { return &given, nil }
	k, m := newKernel(t, stages.Options{}, p)
	set(t, m, "compress", `{}`)
	block := json.RawMessage(`{"type":"text","text":"<a & b>` + strings.Repeat("x", 2000) + `"}`)
	asks := `{"agentctl/accept":"gzip"}`
	tests := []struct {
		name, meta string
		given      kernel.Result
		packed     bool
	}{
		{"asked", asks, kernel.Result{Structured: json.RawMessage(long)}, true},
		{"asked, with content", asks, kernel.Result{Structured: json.RawMessage(long), Content: []json.RawMessage{block}}, true},
		{"content only", asks, kernel.Result{Content: []json.RawMessage{block, block}}, true},
		{"asked by a header", `{"agentctl/accept":"br;q=1.0, gzip;q=0.8, *"}`, kernel.Result{Structured: json.RawMessage(long)}, true},
		{"not asked", "", kernel.Result{Structured: json.RawMessage(long)}, false},
		{"asked for another", `{"agentctl/accept":"br, gzip;q=0.0, *"}`, kernel.Result{Structured: json.RawMessage(long)}, false},
		{"small", asks, kernel.Result{Structured: json.RawMessage(`{"a":"` + strings.Repeat("x", 1000) + `"}`)}, false},
		{"noise", asks, kernel.Result{Structured: json.RawMessage(`{"a":"` + string(noise[:1100]) + `"}`)}, false},
		{"packed already", asks, kernel.Result{Structured: json.RawMessage(long), Meta: json.RawMessage(`{"agentctl/encoding":"gzip"}`)}, false},
		{"a question", asks, kernel.Result{InputRequests: json.RawMessage(long)}, false},
		{"a fault", asks, kernel.Result{RPCError: &kernel.RPCError{Message: long}}, false},
	}
	for _, force := range []bool{false, true} {
		set(t, m, "compress", fmt.Sprintf(`{"force":%v}`, force))
		for _, tt := range tests {
			given = tt.given
			want := tt.packed || force && (tt.name == "not asked" || tt.name == "asked for another")
			for range 2 {
				res, err := k.Call(t.Context(), request(agent(), "p.do", "", tt.meta))
				if err != nil {
					t.Fatalf("%s: %v", tt.name, err)
				}
				if !want {
					if string(res.Structured) != string(tt.given.Structured) || len(res.Content) != len(tt.given.Content) || string(res.Meta) != string(tt.given.Meta) {
						t.Errorf("%s (force %v): got %.80s %s", tt.name, force, res.Structured, res.Meta)
					}
					continue
				}
				plain, err := stages.Unpack(res.Structured, 1<<20)
				var got stages.Payload
				if err != nil || json.Unmarshal(plain, &got) != nil || string(res.Meta) != `{"agentctl/encoding":"gzip"}` {
					t.Errorf("%s (force %v): %v, %s", tt.name, force, err, res.Meta)
					continue
				}
				size := len(tt.given.Structured)
				if string(got.Structured) != string(tt.given.Structured) || len(got.Content) != len(tt.given.Content) {
					t.Errorf("%s: unpacked to %.80s", tt.name, plain)
				}
				for i, b := range tt.given.Content {
					size += len(b)
					if !sameJSON(t, b, got.Content[i]) {
						t.Errorf("%s: content %d is %.80s", tt.name, i, got.Content[i])
					}
				}
				if now := len(res.Structured) + len(res.Content[0]); now*2 > size {
					t.Errorf("%s: %d bytes of %d", tt.name, now, size)
				}
			}
			if given.Meta != nil && string(given.Meta) != string(tt.given.Meta) {
				t.Errorf("%s: the plugin's result was changed", tt.name)
			}
		}
		d := &device{node: "01hzx9k3m4p7q8r9s0t1v2w3xy"}
		_ = k.Load(d, true)
		if res, err := k.Call(t.Context(), &kernel.Request{Caller: agent(), Tool: d.stream(), Stream: true, Meta: json.RawMessage(asks)}); err != nil || res.Stream != (stream{}) || res.Meta != nil || res.Structured != nil {
			t.Errorf("a stream: %+v, %v", res, err)
		}
	}
	res, data, err := k.Read(t.Context(), agent(), "mcp://p/all.json") // by force
	if plain, e := stages.Unpack(data, 1<<20); err != nil || e != nil || string(plain) != long || res.MIME != stages.MIMEPacked || len(data)*2 > len(long) {
		t.Errorf("a read: %v %v, %s, %d bytes of %d", err, e, res.MIME, len(data), len(long))
	}
}

func sameJSON(t *testing.T, a, b []byte) bool {
	t.Helper()
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal(b, &y) != nil {
		return false
	}
	return fmt.Sprint(x) == fmt.Sprint(y)
}

func TestUnpackArguments(t *testing.T) {
	p := &plugin{name: "p"}
	k, m := newKernel(t, stages.Options{}, p)
	set(t, m, "compress", `{}`)
	args := `{"message":"` + strings.Repeat("hello ", 1000) + `"}`
	good := string(stages.Pack([]byte(args)))
	bomb := string(stages.Pack([]byte(`{"a":"` + strings.Repeat(" ", 1<<20) + `"}`)))
	lie := strings.Replace(string(stages.Pack([]byte(`{"a":"`+strings.Repeat(" ", 8<<20)+`"}`))), `"bytes":8388616`, `"bytes":100`, 1)
	if !strings.Contains(lie, `"bytes":100`) {
		t.Fatal("the lie is none")
	}
	for name, tt := range map[string]struct{ sent, saw string }{
		"packed":              {good, args},
		"with white space":    {" " + strings.Replace(good, ":", " : ", 1), args},
		"a mere quotation":    {`{"x":"\"agentctl/packed\""}`, `{"x":"\"agentctl/packed\""}`},
		"the key, not alone":  {`{"agentctl/packed":{},"x":1}`, `{"agentctl/packed":{},"x":1}`},
		"plain":               {`{"x":1}`, `{"x":1}`},
		"a bomb":              {bomb, ""},
		"a lie":               {lie, ""},
		"no object":           {string(stages.Pack([]byte(`[1]`))), ""},
		"nothing":             {string(stages.Pack(nil)), ""},
		"no JSON":             {string(stages.Pack([]byte(`{"a":1,"a":2}`))), ""},
		"no gzip":             {`{"agentctl/packed":{"alg":"gzip","bytes":3,"data":"AAAA"}}`, ""},
		"another algorithm":   {strings.Replace(good, "gzip", "zstd", 1), ""},
		"half of it":          {truncated(t, good), ""},
		"a negative size":     {`{"agentctl/packed":{"alg":"gzip","bytes":-1,"data":"AAAA"}}`, ""},
		"packed in a package": {string(stages.Pack([]byte(good))), good},
	} {
		r := request(agent(), "p.do", tt.sent, "")
		for range 2 { // the same request once more
			_, err := k.Call(t.Context(), r)
			if tt.saw == "" {
				wantCode(t, name, err, manifest.BadRequest, "packed")
			} else if err != nil || p.last() != tt.saw {
				t.Errorf("%s: the plugin saw %.60s, %v", name, p.last(), err)
			}
			if name == "packed in a package" {
				break
			}
		}
	}
}

// truncated keeps half of the data in an envelope.
func truncated(t *testing.T, env string) string {
	t.Helper()
	head, data, ok := strings.Cut(env, `"data":"`)
	if !ok {
		t.Fatal("no envelope")
	}
	return head + `"data":"` + data[:len(data)/8*4] + `"}}`
}

// Everything on at once, as a client meets it: verify, unpack and find no secret; the
// plugin saw plain arguments; a repetition gets the same bytes.
func TestStagesCombined(t *testing.T) {
	secret := `{"password":"` + canary + `","rows":"` + strings.Repeat("row ", 500) + `"}`
	p := &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(secret)}, nil
	}}
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, p)
	key := []byte(strings.Repeat("1", 32))
	set(t, m, "rate", `{}`)
	set(t, m, "sign", `{"kid":"one","key_file":"k1","require":true}`)
	set(t, m, "compress", `{"force":true}`)
	set(t, m, "acl", `{"rules":[{"effect":"transform","set":{"z":1}}]}`)
	set(t, m, "redact", `{"patterns":["`+canary+`"]}`)
	if got := k.Pipeline().Names(); fmt.Sprint(got) != "[trace metrics rate sign compress acl redact]" {
		t.Errorf("in force: %v", got)
	}
	var last string
	for i := range 2 {
		r := request(agent(), "p.do", string(stages.Pack([]byte(`{"a":1}`))), "")
		sig, err := stages.RequestMessage(r).Sign("one", key)
		if err != nil {
			t.Fatal(err)
		}
		r.Meta, _ = json.Marshal(map[string]any{stages.MetaSignature: sig})
		res, err := k.Call(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		var meta struct {
			Sig stages.Signature `json:"agentctl/sig"`
		}
		if err := json.Unmarshal(res.Meta, &meta); err != nil {
			t.Fatal(err)
		}
		if err := stages.ResultMessage(r, res).Verify(meta.Sig, key); err != nil {
			t.Error(err)
		}
		plain, err := stages.Unpack(res.Structured, 1<<20)
		if err != nil || strings.Contains(string(plain), canary) || !strings.Contains(string(plain), `"password":"[redacted]"`) {
			t.Errorf("%v: %.80s", err, plain)
		}
		if p.last() != `{"a":1,"z":1}` {
			t.Errorf("the plugin saw %s", p.last())
		}
		if now := string(res.Structured) + string(res.Meta); i > 0 && now != last {
			t.Error("a repetition gets other bytes")
		} else {
			last = now
		}
	}
}

// A list in which every stage is twice answers like one in which it is once:
// nothing is packed, signed or cleaned twice. (A list refuses one stage twice; other names
// get past that.)
func TestDoubledList(t *testing.T) {
	secret := json.RawMessage(`{"password":"x","rows":"` + strings.Repeat("row ", 500) + `"}`)
	p := &plugin{name: "p", call: func(*kernel.Request) (*kernel.Result, error) { return &kernel.Result{Structured: secret}, nil }}
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, p)
	for name, config := range map[string]string{"sign": `{"kid":"one","key_file":"k1"}`, "compress": `{}`, "acl": `{"rules":[{"effect":"transform","set":{"z":1}}]}`, "redact": `{}`} {
		set(t, m, name, config)
	}
	req := func() *kernel.Request { return request(agent(), "p.do", `{"a":1}`, `{"agentctl/accept":"gzip"}`) }
	once, err := k.Call(t.Context(), req())
	if err != nil {
		t.Fatal(err)
	}
	twice := k.Pipeline().Entries()
	for _, e := range k.Pipeline().Entries() {
		e.Stage.Name += " again"
		twice = append(twice, e)
	}
	for i := range twice {
		twice[i].Stage.OuterTo = nil
	}
	if err := k.Pipeline().SwapEntries(twice...); err != nil {
		t.Fatal(err)
	}
	again, err := k.Call(t.Context(), req())
	if err != nil || string(again.Structured) != string(once.Structured) || string(again.Meta) != string(once.Meta) || p.last() != `{"a":1,"z":1}` {
		t.Errorf("twice: %.80s %s, %v; once: %.80s %s; the plugin saw %s", again.Structured, again.Meta, err, once.Structured, once.Meta, p.last())
	}
}

func ExampleMessage_Verify() {
	key := []byte("a key of thirty-two bytes or more")
	sent := stages.Message{Kind: "result", Tool: "tickets.get", Structured: json.RawMessage(`{"id":"T-1","open":true}`)}
	sig, _ := sent.Sign("k1", key)
	got := sent
	got.Structured = json.RawMessage(`{ "open": true, "id": "T-1" }`)
	fmt.Println(got.Verify(sig, key))
	got.Structured = json.RawMessage(`{"id":"T-1","open":false}`)
	fmt.Println(got.Verify(sig, key))
	// Output:
	// <nil>
	// stages: the signature does not match the message
}
