package stages_test

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"agentctl/relay/kernel"
	"agentctl/relay/stages"
)

// TestVectorOfDocs recomputes the test vector of docs/kernel.md.
func TestVectorOfDocs(t *testing.T) {
	doc, err := os.ReadFile("../../docs/kernel.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(doc), "A test vector.")
	blocks := regexp.MustCompile("(?s)```[a-z]+\n(.*?)\n```").FindAllStringSubmatch(text, 3)
	if len(blocks) != 3 {
		t.Fatalf("%d blocks", len(blocks))
	}
	key, answer, signed := blocks[0][1], blocks[1][1], blocks[2][1]
	a, err := stages.ParseAnswer([]byte(answer))
	if err != nil {
		t.Fatal(err)
	}
	a.Message.Tool, a.Message.Nonce = "notes.search", "n-1"
	if err := a.Verify([]byte(key)); err != nil {
		t.Error(err)
	}
	a.Message.Content = nil
	if got, err := a.Message.Canonical(); err != nil || string(got) != signed {
		t.Errorf("signed are %s, %v; the docs say %s", got, err, signed)
	}
	if sig, err := a.Message.Sign("a", []byte(key)); err != nil || sig != a.Signature {
		t.Errorf("signature %+v, %v; the docs say %+v", sig, err, a.Signature)
	}
}

// signedCall makes a signed call or read, and returns the result.
func signedCall(t *testing.T, p *plugin, r *kernel.Request) *kernel.Result {
	t.Helper()
	k, m := newKernel(t, stages.Options{KeyDir: keyDir(t)}, p)
	enable(t, m, "sign", `{"kid":"one","key_file":"k1"}`)
	res, err := k.Call(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	return res
}

func gzipped(t *testing.T, s string) string {
	t.Helper()
	var b bytes.Buffer
	zw := gzip.NewWriter(&b)
	if _, err := zw.Write([]byte(s)); err != nil || zw.Close() != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestSignedAnswer: an answer verifies in every form in which a client can save it, and no longer
// when anything in it that a client uses is changed.
func TestSignedAnswer(t *testing.T) {
	key := []byte(strings.Repeat("1", 32))
	const doc = `{"b":1.50,"a":[9007199254740993,"<\u00e9>"]}`
	const text = `{"type":"text","text":"hello"}`
	structured := func(*kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(doc)}, nil
	}
	both := func(*kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Structured: json.RawMessage(doc), Content: []json.RawMessage{json.RawMessage(text)}, IsError: true}, nil
	}
	content := func(*kernel.Request) (*kernel.Result, error) {
		return &kernel.Result{Content: []json.RawMessage{json.RawMessage(text)}}, nil
	}
	copied := string(encode(t, []map[string]string{{"type": "text", "text": doc}}))
	read := &kernel.Request{Method: kernel.MethodRead, Caller: agent(), URI: "mcp://p/all.json", Meta: json.RawMessage(`{"agentctl/nonce":"n"}`)}
	call := request(agent(), "p.do", `{}`, `{"agentctl/nonce":"n"}`)
	for _, tt := range []struct {
		name string
		call func(*kernel.Request) (*kernel.Result, error)
		req  *kernel.Request
		file string // META is the _meta of the answer
		// changes are edits of the file after which the signature is wrong: old, new.
		changes [][2]string
	}{
		{"a result", structured, call, `{"content":` + copied + `,"structuredContent":` + doc + `,"_meta":META}`, [][2]string{{"1.50,\"a\":[9", "1.51,\"a\":[9"}, {`hello`, `x`}, {`{"content"`, `{"isError":true,"content"`}, {`\"b\":1.50`, `\"b\":2`}}},
		{"a result without the copy", structured, call, `{"structuredContent":` + doc + `,"_meta":META}`, nil},
		{"a reformatted result", structured, call, "{ \"structuredContent\": {\"a\": [9007199254740993, \"<é>\"],\n \"b\": 15e-1}, \"_meta\": META}\n", [][2]string{{"993", "992"}}},
		{"a message", both, call, `{"jsonrpc":"2.0","id":7,"result":{"content":[` + text + `],"structuredContent":` + doc + `,"isError":true,"_meta":META}}`, [][2]string{{`"isError":true`, `"isError":false`}, {"hello", "hallo"}, {"1.50", "1.51"}}},
		{"events", content, call, "event: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{}}\n\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{\"content\":[" + text + "],\"_meta\":META}}\n\n", [][2]string{{"hello", "hallo"}}},
		{"HTTP", structured, call, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nagentctl-meta: META\r\n\r\n" + doc, [][2]string{{"1.50", "1.51"}, {"200 OK", "500 No"}}},
		{"HTTP with an interim response", structured, call, "HTTP/1.1 100 Continue\r\n\r\nHTTP/2 200\r\nAgentctl-Meta: META\r\n\r\n" + doc + "\n", nil},
		{"HTTP, compressed", structured, call, "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nAgentctl-Meta: META\r\n\r\n" + gzipped(t, doc), nil},
		{"HTTP, unpacked by curl", structured, call, "HTTP/1.1 200 OK\nContent-Encoding: gzip\nAgentctl-Meta: META\n\n" + doc, nil},
		{"HTTP, an error of the tool", both, call, "HTTP/1.1 422 Unprocessable Entity\r\nAgentctl-Meta: META\r\n\r\n" + doc, nil},
		{"HTTP, content only", content, call, "HTTP/1.1 200 OK\r\nAgentctl-Meta: META\r\n\r\n" + `{"content":[` + text + `]}`, [][2]string{{"hello", "hallo"}}},
		{"HTTP, MCP", content, call, "HTTP/1.1 200 OK\r\n\r\n" + `{"jsonrpc":"2.0","id":7,"result":{"content":[` + text + `],"_meta":META}}`, nil},
		{"a read", nil, read, `{"contents":[{"uri":"mcp://p/all.json","mimeType":"application/json","text":"[1,2]"}],"_meta":META}`, [][2]string{{"[1,2]", "[1,3]"}, {"p/all", "q/all"}}},
		{"a read in base64", nil, read, `{"contents":[{"uri":"mcp://p/all.json","blob":"` + base64.StdEncoding.EncodeToString([]byte("[1,2]")) + `"}],"_meta":META}`, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			req := *tt.req
			req.Caller = agent()
			if !strings.HasPrefix(tt.file, "HTTP/") || tt.name == "HTTP, MCP" {
				req.Caller.Transport = "mcp"
			}
			res := signedCall(t, &plugin{name: "p", call: tt.call, read: "[1,2]"}, &req)
			verify := func(file, tool, nonce string, key []byte) error {
				a, err := stages.ParseAnswer([]byte(strings.Replace(file, "META", string(res.Meta), 1)))
				if err != nil {
					return err
				}
				if a.Message.URI == "" {
					a.Message.Tool = tool
				}
				a.Message.Nonce = nonce
				return a.Verify(key)
			}
			err := verify(tt.file, "p.do", "n", key)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range tt.changes {
				if changed := strings.Replace(tt.file, c[0], c[1], 1); changed != tt.file {
					if err := verify(changed, "p.do", "n", key); !errors.Is(err, stages.ErrSignature) {
						t.Errorf("%q instead of %q: %v", c[1], c[0], err)
					}
				} else if c[0] != "hello" {
					t.Errorf("%q is not in the file", c[0])
				}
			}
			if err := verify(tt.file, "p.do", "n2", key); !errors.Is(err, stages.ErrSignature) {
				t.Errorf("another nonce: %v", err)
			}
			if err := verify(tt.file, "p.do", "n", []byte(strings.Repeat("3", 32))); !errors.Is(err, stages.ErrSignature) {
				t.Errorf("another key: %v", err)
			}
			if tt.req == call {
				if err := verify(tt.file, "p.other", "n", key); !errors.Is(err, stages.ErrSignature) {
					t.Errorf("another tool: %v", err)
				}
			}
		})
	}
}

func TestParseAnswerRefuses(t *testing.T) {
	for file, want := range map[string]error{
		"": stages.ErrNotAnswer, "null": stages.ErrNotAnswer, "[]": stages.ErrNotAnswer, "{": stages.ErrNotAnswer, `{"a":1,"a":2}`: stages.ErrNotAnswer,
		`{"content":[]}`: stages.ErrUnsigned, `{"_meta":{}}`: stages.ErrUnsigned, `{"_meta":{"agentctl/sig":5}}`: stages.ErrUnsigned,
		`{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"m"}}`: stages.ErrRPCError, `{"jsonrpc":"2.0","id":1}`: stages.ErrNotAnswer,
		"HTTP/1.1 200 OK\r\nAgentctl-Meta: {}": stages.ErrNotAnswer, "HTTP/1.1 200 OK\r\n\r\n{}": stages.ErrUnsigned, "HTTP/1.1\r\n\r\n{}": stages.ErrNotAnswer,
		"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8bxx":                                               stages.ErrNotAnswer,
		`{"contents":[],"_meta":{"agentctl/sig":{}}}`:                                                               stages.ErrNotAnswer,
		`{"contents":[{"uri":"u","text":"a","blob":"YQ=="}],"_meta":{"agentctl/sig":{}}}`:                           stages.ErrNotAnswer,
		`{"contents":[{"uri":"u","Text":"a"}],"_meta":{"agentctl/sig":{"alg":"HMAC-SHA256","kid":"a","sig":"00"}}}`: stages.ErrNotAnswer,
	} {
		if _, err := stages.ParseAnswer([]byte(file)); !errors.Is(err, want) {
			t.Errorf("%q: %v, want %v", file, err, want)
		}
	}
}

func TestReadKeyFile(t *testing.T) {
	dir := t.TempDir()
	for content, good := range map[string]bool{
		strings.Repeat("k", 32) + "\r\n": true, strings.Repeat("k", 31) + "\n": false, strings.Repeat("k", 4096): true, strings.Repeat("k", 4097): false, "": false,
	} {
		path := filepath.Join(dir, fmt.Sprint(len(content)))
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if key, err := stages.ReadKeyFile(path); (err == nil) != good || good && string(key) != strings.TrimRight(content, "\r\n") {
			t.Errorf("%d bytes: %v", len(content), err)
		}
	}
}
