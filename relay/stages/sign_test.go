package stages_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"agentctl/manifest"
	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

// The keys of keyDir.
var (
	key1 = []byte(strings.Repeat("1", 32))
	key2 = []byte(strings.Repeat("2", 40))
)

// newSigningKernel returns a kernel that signs results with key1, which it calls "one", and accepts
// requests signed with key2, "two", as well. require is the setting of that name.
func newSigningKernel(t *testing.T, require bool, p *plugin) (*kernel.Kernel, *stages.Manager) {
	t.Helper()
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, p)
	enable(t, m, "sign", fmt.Sprintf(`{"kid":"one","key_file":"k1","accept":[{"kid":"two","key_file":"k2"}],"require":%v}`, require))
	return k, m
}

// signatureOf returns the signature in the _meta of a result.
func signatureOf(t *testing.T, res *kernel.Result) stages.Signature {
	t.Helper()
	var meta struct {
		Sig stages.Signature `json:"agentctl/sig"`
	}
	if err := json.Unmarshal(res.Meta, &meta); err != nil || meta.Sig.Kid != "one" || meta.Sig.Alg != stages.Algorithm {
		t.Fatalf("the signature in _meta %s (%v), want one of key \"one\"", res.Meta, err)
	}
	return meta.Sig
}

// signed signs a request, whose _meta it replaces.
func signed(t *testing.T, r *kernel.Request, kid string, key []byte) *kernel.Request {
	t.Helper()
	sig, err := stages.RequestMessage(r).Sign(kid, key)
	if err != nil {
		t.Fatal(err)
	}
	r.Meta, _ = json.Marshal(map[string]any{stages.MetaSignature: sig}) // cannot fail
	return r
}

// callSigned calls p.do with a nonce.
func callSigned(t *testing.T, k *kernel.Kernel) (*kernel.Request, *kernel.Result) {
	t.Helper()
	r := request(agent(), "p.do", `{}`, `{"agentctl/nonce":"n1"}`)
	res, err := k.Call(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return r, res
}

// numbers is a result whose numbers have more than one JSON form.
const numbers = `{"b":1.50,"a":9007199254740993}`

func answerNumbers(*kernel.Request) (*kernel.Result, error) {
	return &kernel.Result{Structured: json.RawMessage(numbers), Meta: json.RawMessage(`{"mine":1}`)}, nil
}

// TestSignedResult: the client verifies the result that it got, in whatever form it keeps the JSON.
func TestSignedResult(t *testing.T) {
	k, _ := newSigningKernel(t, false, &plugin{name: "p", call: answerNumbers})
	r, res := callSigned(t, k)
	sig := signatureOf(t, res)
	if err := stages.ResultMessage(r, res).Verify(sig, key1); err != nil {
		t.Errorf("the result as it was sent: %v", err)
	}
	reformatted := stages.Message{Kind: "result", Tool: "p.do", Nonce: "n1", Structured: json.RawMessage(`{ "a": 9007199254740993, "b": 15e-1 }`)}
	if err := reformatted.Verify(sig, key1); err != nil {
		t.Errorf("the result in another JSON form: %v", err)
	}
	if err := reformatted.Verify(sig, key2); !errors.Is(err, stages.ErrSignature) {
		t.Errorf("verified with another key: %v, want ErrSignature", err)
	}
	if !strings.Contains(string(res.Meta), `"mine":1`) {
		t.Errorf("_meta %s, want the plugin's members beside the signature", res.Meta)
	}
	if _, again := callSigned(t, k); signatureOf(t, again) != sig {
		t.Error("the same call is signed otherwise")
	}
}

// TestTamperedResult: a signature does not verify once anything that it covers, or itself, has
// changed.
func TestTamperedResult(t *testing.T) {
	k, _ := newSigningKernel(t, false, &plugin{name: "p", call: answerNumbers})
	r, res := callSigned(t, k)
	sent, sig := *stages.ResultMessage(r, res), signatureOf(t, res)
	for name, change := range map[string]func(*stages.Message, *stages.Signature){
		"another value": func(m *stages.Message, _ *stages.Signature) {
			m.Structured = json.RawMessage(`{"b":1.51,"a":9007199254740993}`)
		},
		"another last digit": func(m *stages.Message, _ *stages.Signature) {
			m.Structured = json.RawMessage(`{"b":1.5,"a":9007199254740992}`)
		},
		"a member less":     func(m *stages.Message, _ *stages.Signature) { m.Structured = json.RawMessage(`{"b":1.5}`) },
		"content":           func(m *stages.Message, _ *stages.Signature) { m.Content = []json.RawMessage{json.RawMessage(`{}`)} },
		"isError":           func(m *stages.Message, _ *stages.Signature) { m.IsError = true },
		"another tool":      func(m *stages.Message, _ *stages.Signature) { m.Tool = "p.other" },
		"another nonce":     func(m *stages.Message, _ *stages.Signature) { m.Nonce = "n2" },
		"a request's kind":  func(m *stages.Message, _ *stages.Signature) { m.Kind = "request" },
		"another HMAC":      func(_ *stages.Message, s *stages.Signature) { s.Sig = "00" + s.Sig[2:] },
		"half of the HMAC":  func(_ *stages.Message, s *stages.Signature) { s.Sig = s.Sig[:32] },
		"no HMAC":           func(_ *stages.Message, s *stages.Signature) { s.Sig = "" },
		"another algorithm": func(_ *stages.Message, s *stages.Signature) { s.Alg = "none" },
	} {
		msg, changed := sent, sig
		change(&msg, &changed)
		if err := msg.Verify(changed, key1); !errors.Is(err, stages.ErrSignature) {
			t.Errorf("%s: %v, want ErrSignature", name, err)
		}
	}
}

// TestSignedRead: the data of a resource is signed, too.
func TestSignedRead(t *testing.T) {
	k, _ := newSigningKernel(t, false, &plugin{name: "p", read: `{"r":1}`})
	r := &kernel.Request{Method: kernel.MethodRead, Caller: agent(), URI: "mcp://p/all.json"}
	res, err := k.Call(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if err := stages.ResultMessage(r, res).Verify(signatureOf(t, res), key1); err != nil {
		t.Errorf("the data as it was sent: %v", err)
	}
	changed := stages.ResultMessage(r, &kernel.Result{Data: []byte(`{"r":2}`)})
	if err := changed.Verify(signatureOf(t, res), key1); !errors.Is(err, stages.ErrSignature) {
		t.Errorf("other data: %v, want ErrSignature", err)
	}
}

// TestStreamIsUnsigned: frames of a stream follow the result, so that a signature would cover none.
func TestStreamIsUnsigned(t *testing.T) {
	k, _ := newSigningKernel(t, false, &plugin{name: "p"})
	d := loadDevice(t, k)
	res, err := k.Call(t.Context(), &kernel.Request{Caller: agent(), Tool: d.stream(), Stream: true})
	if err != nil || res.Stream != (stream{}) || res.Meta != nil {
		t.Errorf("got %+v, %v; want the stream without _meta", res, err)
	}
}

// TestSignedRequests: a request with a signature has to match it. Without one it is served, unless
// the stage requires signatures.
func TestSignedRequests(t *testing.T) {
	const served = ""
	reordered := signed(t, request(agent(), "p.do", `{"x":1,"y":[2.0]}`, ""), "two", key2)
	reordered.Arguments = json.RawMessage(`{"y": [2], "x": 1}`)
	changed := signed(t, request(agent(), "p.do", `{"x":1}`, ""), "two", key2)
	changed.Arguments = json.RawMessage(`{"x":2}`)
	moved := signed(t, request(agent(), "p.do", `{"x":1}`, ""), "two", key2)
	moved.Tool = "p.other"
	tests := []struct {
		name   string
		req    *kernel.Request
		denied string // the reason of the refusal, or served
	}{
		{"the key that signs results", signed(t, request(agent(), "p.do", `{"x":1}`, ""), "one", key1), served},
		{"an accepted key", signed(t, request(agent(), "p.do", ``, ""), "two", key2), served},
		{"arguments in another JSON form", reordered, served},
		{"a read", signed(t, &kernel.Request{Method: kernel.MethodRead, Caller: agent(), URI: "mcp://p/all.json"}, "one", key1), served},
		{"changed arguments", changed, "signature"},
		{"another tool", moved, "signature"},
		{"an unknown key id", signed(t, request(agent(), "p.do", ``, ""), "three", key1), "signature"},
		{"the id of another key", signed(t, request(agent(), "p.do", ``, ""), "one", key2), "signature"},
		{"a signature that is a number", request(agent(), "p.do", ``, `{"agentctl/sig":5}`), "signature"},
	}
	for _, require := range []bool{false, true} {
		unsigned := map[bool]string{false: served, true: "unsigned"}[require]
		p := &plugin{name: "p", read: `{}`}
		k, _ := newSigningKernel(t, require, p)
		for _, tt := range append(tests, struct {
			name   string
			req    *kernel.Request
			denied string
		}{"no signature", request(agent(), "p.do", `{"x":1}`, ""), unsigned}) {
			name, before := fmt.Sprintf("require %v: %s", require, tt.name), len(p.seen)
			_, err := k.Call(t.Context(), tt.req)
			if tt.denied == served {
				if err != nil {
					t.Errorf("%s: refused: %v", name, err)
				}
				continue
			}
			wantCode(t, name, err, manifest.SafetyDenied, tt.denied)
			if len(p.seen) != before {
				t.Errorf("%s: the request reached the plugin", name)
			}
		}
	}
}

// TestKeysStaySecret: the list of stages shows the names of keys, not the keys.
func TestKeysStaySecret(t *testing.T) {
	_, m := newSigningKernel(t, false, &plugin{name: "p"})
	for _, w := range m.List() {
		if strings.Contains(string(w.Config), "1111") {
			t.Errorf("the configuration of %s shows the key: %s", w.Name, w.Config)
		}
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
