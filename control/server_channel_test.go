//go:build linux

package control

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"agentctl/strictjson"

	"github.com/creachadair/jrpc2"
)

func TestCheckMessage(t *testing.T) {
	const pass, silent = 1, 0
	tests := []struct {
		name, in string
		want     int // pass, silent, or the code of the reply
		id       string
	}{
		{"call", `{"jsonrpc":"2.0","id":1,"method":"stop"}`, pass, ""},
		{"string id", `{"jsonrpc":"2.0","id":"a","method":"stop","params":{}}`, pass, ""},
		{"notification", `{"jsonrpc":"2.0","method":"stop"}`, pass, ""},
		{"null params", `{"jsonrpc":"2.0","id":1,"method":"stop","params":null}`, pass, ""},
		{"unknown method", `{"jsonrpc":"2.0","id":1,"method":"nope"}`, pass, ""},

		{"empty", ``, CodeParse, "null"},
		{"garbage", `{"jsonrpc":`, CodeParse, "null"},
		{"two values", `{}{}`, CodeParse, "null"},
		{"duplicate key", `{"jsonrpc":"2.0","id":1,"id":2,"method":"stop"}`, CodeParse, "null"},
		{"duplicate key in params", `{"jsonrpc":"2.0","id":1,"method":"stop","params":{"a":1,"a":1}}`, CodeParse, "null"},
		{"too deep", `{"jsonrpc":"2.0","id":1,"method":"stop","params":{"a":` + strings.Repeat("[", 20) + strings.Repeat("]", 20) + `}}`, CodeParse, "null"},
		{"bad utf-8", "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"\xff\"}", CodeParse, "null"},

		{"batch", `[{"jsonrpc":"2.0","id":1,"method":"stop"}]`, CodeInvalidRequest, "null"},
		{"empty batch", ` []`, CodeInvalidRequest, "null"},
		{"string", `"x"`, CodeInvalidRequest, "null"},
		{"empty object", `{}`, CodeInvalidRequest, "null"},
		{"too many elements", `{"jsonrpc":"2.0","id":1,"method":"stop","params":{"a":[1` + strings.Repeat(",1", maxCommas) + `]}}`, CodeInvalidRequest, "null"},
		{"commas in a string", `{"jsonrpc":"2.0","id":1,"method":"stop","params":{"a":"\"` + strings.Repeat(",", 2*maxCommas) + `"}}`, pass, ""},

		{"no version", `{"id":1,"method":"stop"}`, CodeInvalidRequest, "1"},
		{"version 1.0", `{"jsonrpc":"1.0","id":1,"method":"stop"}`, CodeInvalidRequest, "1"},
		{"unknown key", `{"jsonrpc":"2.0","id":7,"method":"stop","meta":{}}`, CodeInvalidRequest, "7"},
		{"key in other case", `{"jsonrpc":"2.0","id":7,"Method":"stop"}`, CodeInvalidRequest, "7"},
		{"no method", `{"jsonrpc":"2.0","id":"x"}`, CodeInvalidRequest, `"x"`},
		{"empty method", `{"jsonrpc":"2.0","id":1,"method":""}`, CodeInvalidRequest, "1"},
		{"long method", `{"jsonrpc":"2.0","id":1,"method":"` + strings.Repeat("m", 65) + `"}`, CodeInvalidRequest, "1"},
		{"method is a number", `{"jsonrpc":"2.0","id":1,"method":5}`, CodeInvalidRequest, "1"},
		{"null id", `{"jsonrpc":"2.0","id":null,"method":"stop"}`, CodeInvalidRequest, "null"},
		{"object id", `{"jsonrpc":"2.0","id":{},"method":"stop"}`, CodeInvalidRequest, "null"},
		{"long id", `{"jsonrpc":"2.0","id":"` + strings.Repeat("i", maxID) + `","method":"stop"}`, CodeInvalidRequest, "null"},

		{"array params", `{"jsonrpc":"2.0","id":1,"method":"stop","params":[1]}`, CodeInvalidParams, "1"},
		{"no array params", `{"jsonrpc":"2.0","id":1,"method":"stop","params":[ ]}`, pass, ""},
		{"string params", `{"jsonrpc":"2.0","id":1,"method":"stop","params":"x"}`, CodeInvalidParams, "1"},
		{"long params", `{"jsonrpc":"2.0","id":1,"method":"stop","params":{"a":"` + strings.Repeat("x", MaxParams) + `"}}`, CodeInvalidParams, "1"},
		{"array params, notification", `{"jsonrpc":"2.0","method":"stop","params":[1]}`, silent, ""},

		{"answer", `{"jsonrpc":"2.0","id":1,"result":{}}`, silent, ""},
		{"error answer", `{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":"x"}}`, silent, ""},
		{"mixed", `{"jsonrpc":"2.0","id":1,"method":"stop","result":{}}`, CodeInvalidRequest, "1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			request, reply := checkMessage([]byte(tt.in))
			got, id := silent, ""
			if request != nil {
				got = pass
			} else if reply != nil {
				got, id = parseReply(t, reply)
			}
			if got != tt.want || id != tt.id {
				t.Errorf("got %d with id %s, want %d with id %s; reply %s", got, id, tt.want, tt.id, reply)
			}
		})
	}
}

func parseReply(t *testing.T, reply []byte) (code int, id string) {
	t.Helper()
	var m struct {
		JSONRPC string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Error   errorObject     `json:"error"`
	}
	if err := strictjson.Unmarshal(reply, &m); err != nil {
		t.Fatalf("the reply %s: %v", reply, err)
	}
	if want := codeWords[m.Error.Code]; m.Error.Message != want || want == "" {
		t.Errorf("code %d has message %q, want %q", m.Error.Code, m.Error.Message, want)
	}
	return m.Error.Code, string(m.ID)
}

var codeWords = map[int]string{
	CodeParse: "parse_error", CodeInvalidRequest: "invalid_request", CodeMethodNotFound: "method_not_found",
	CodeInvalidParams: "invalid_params", CodeUnauthorized: "unauthorized", CodeNotSupported: "not_supported",
	CodeRateLimited: "rate_limited", CodeInternal: "internal",
}

// FuzzCheckMessage compares checkMessage with jrpc2's own parser: what passes must be one valid
// request there as well, and both must agree on whether it gets an answer. Otherwise a
// connection would wait forever for its request to finish.
func FuzzCheckMessage(f *testing.F) {
	for _, s := range []string{
		`{"jsonrpc":"2.0","id":1,"method":"hello","params":{"token":"x"}}`,
		`{"jsonrpc":"2.0","method":"stop"}`, `{"jsonrpc":"2.0","id":-1.5e3,"method":"stop","params":null}`,
		`[]`, `{"jsonrpc":"2.0","id":null,"method":"stop"}`, `{"jsonrpc":"2.0","id":"\u0031","method":"\u0073"}`,
		`{"jsonrpc":"2.0","id":1,"result":1}`, "\ufeff{}", ` {"jsonrpc":"2.0" , "id" : 1,"method":"a"} `,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		request, reply := checkMessage(data)
		if request != nil && reply != nil {
			t.Fatalf("%q passes and is answered", data)
		}
		if reply != nil {
			parseReply(t, reply)
		}
		if request == nil {
			return
		}
		reqs, err := jrpc2.ParseRequests(data)
		if err != nil || len(reqs) != 1 || reqs[0].Batch || reqs[0].Error != nil || reqs[0].Method == "" {
			t.Fatalf("%q passes, jrpc2 says %v %+v", data, err, reqs)
		}
		var m map[string]any
		if err := json.Unmarshal(data, &m); err != nil {
			t.Fatal(err)
		}
		if _, called := m["id"]; called != (reqs[0].ID != "") {
			t.Fatalf("%q: jrpc2 disagrees about an answer", data)
		}
		large, _ := checkMessage(append(bytes.Repeat([]byte{' '}, maxSmallMessage), data...))
		again, err := jrpc2.ParseRequests(large)
		if err != nil || !reflect.DeepEqual(again, reqs) || len(large) > len(data)+len(`{"jsonrpc":"2.0","id":,"method":,"params":}`) {
			t.Fatalf("%q as a large message becomes %q, %v", data, large, err)
		}
		if fmt.Sprint(m["method"]) != reqs[0].Method {
			t.Fatalf("%q: jrpc2 reads method %q", data, reqs[0].Method)
		}
	})
}
