package client_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"agentctl/client"
	"agentctl/manifest"
)

// The type of an argument decides what its value is; without a type it is JSON or a string.
func TestParseArguments(t *testing.T) {
	types := map[string]manifest.ArgumentType{
		"s": {Type: "string"}, "n": {Type: "integer"}, "list": {Type: "array", Items: "string"}, "numbers": {Type: "array", Items: "number"}, "any": {Type: "array"},
	}
	for _, tt := range []struct{ words, want string }{
		{"x=1", `{"x":1}`},
		{"x=a,b", `{"x":"a,b"}`},
		{"s=1", `{"s":"1"}`},
		{"s=null", `{"s":"null"}`},
		{`s="1"`, `{"s":"1"}`},
		{"s=", `{"s":""}`},
		{"n=1", `{"n":1}`},
		{"n=many", `{"n":"many"}`},
		{"list=a", `{"list":["a"]}`},
		{"list=1,2", `{"list":["1","2"]}`},
		{"list=", `{"list":[]}`},
		{`list="a,b"`, `{"list":["a,b"]}`},
		{`list=["a,b","c"]`, `{"list":["a,b","c"]}`},
		{"numbers=1,2.5", `{"numbers":[1,2.5]}`},
		{"any=1,b", `{"any":[1,"b"]}`},
		{`any={"a":1,"b":2}`, `{"any":[{"a":1,"b":2}]}`},
	} {
		got, err := client.ParseArguments(strings.Fields(tt.words), types)
		if err != nil || string(got) != tt.want {
			t.Errorf("%s: %s, %v, want %s", tt.words, got, err, tt.want)
		}
	}
	for _, words := range []string{"x", "=1", "x=1 x=2"} {
		if _, err := client.ParseArguments(strings.Fields(words), nil); err == nil {
			t.Errorf("%s is accepted", words)
		}
	}
}

// The types of a plugin's tool are those of its input schema, on whichever page of the list it is.
func TestToolArguments(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		var m struct {
			Params struct {
				Cursor string `json:"cursor"`
			} `json:"params"`
		}
		if err := json.NewDecoder(r.Body).Decode(&m); err != nil || r.URL.String() != "/mcp?toolset=notes" {
			t.Errorf("%s: %v", r.URL, err)
		}
		page := `{"tools":[{"name":"notes.a","inputSchema":{"type":"object"}}],"nextCursor":"2"}`
		if m.Params.Cursor == "2" {
			page = `{"tools":[{"name":"notes.b","inputSchema":{"properties":{
				"list":{"type":"array","items":{"type":"string"}},"maybe":{"type":["null","string"]},"both":{"type":["number","string"]},
				"ref":{"$ref":"#/x"},"open":true,"tuple":{"type":"array","items":true}}}}]}`
		}
		_, _ = io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":`+page+`}`)
	})
	types, err := c.ToolArguments(t.Context(), "notes.b")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]manifest.ArgumentType{
		"list": {Type: "array", Items: "string"}, "maybe": {Type: "string"}, "both": {}, "ref": {}, "open": {}, "tuple": {Type: "array"},
	} {
		if types[name] != want {
			t.Errorf("%s is %v, want %v", name, types[name], want)
		}
	}
	for _, tool := range []string{"notes.none", "nodot"} {
		if types, err := c.ToolArguments(t.Context(), tool); types != nil || err != nil {
			t.Errorf("%s: %v, %v", tool, types, err)
		}
	}
}

// A JSON object with status 422 is a tool's answer; an envelope, or a page of a proxy, is not.
func TestToolError(t *testing.T) {
	for body, want := range map[string]bool{
		`{"content":[{"type":"text","text":"no"}],"isError":true}`: true,
		`{"bean":"lima"}`: true,
		`{"error":{"code":"E_MANIFEST_INVALID","message":"m"}}`: false,
		`<html>`: false,
		``:       false,
	} {
		_, err := serve(t, answer(http.StatusUnprocessableEntity, body)).Call(t.Context(), "notes.a", nil)
		tool, ok := errors.AsType[*client.ToolError](err)
		if ok != want || ok && string(tool.Result) != body {
			t.Errorf("%s: %v", body, err)
		}
		if other, isError := errors.AsType[*client.Error](err); isError == want {
			t.Errorf("%s: %v", body, other)
		}
	}
}
