// Command notes is a complete plugin for agentctl's relay, with nothing but the standard
// library: an MCP server over stdin and stdout with two tools and one resource that
// changes. docs/kernel.md explains it step by step.
//
//	go build -o PLUGINS/notes/run ./docs/examples/notes
//	cp docs/examples/notes/plugin.json PLUGINS/notes/
//	agentctl plugin load notes
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
)

// message is a JSON-RPC message, one a line. A request has an id, a notification has none,
// a response has the id of its request.
type message struct {
	JSONRPC string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id,omitempty"`
	Method  string          `json:"method,omitempty"`
	Params  json.RawMessage `json:"params,omitempty"`
	Result  any             `json:"result,omitempty"`
	Error   *rpcError       `json:"error,omitempty"`
}

// rpcError is the error of a response; the codes are those of JSON-RPC.
type rpcError struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

// object is a JSON object.
type object = map[string]any

// allURI is the resource with all notes. It begins with mcp:// and the plugin's name.
const allURI = "mcp://notes/all.json"

// server holds the notes. It handles one message after the other, so it needs no lock. The notes are in
// memory and gone when the process ends. A plugin keeps what has to outlast that in a file below HOME:
// its sandbox lets it write nowhere else, unless plugin.json asks for more.
type server struct {
	out        *json.Encoder
	notes      []string
	subscribed bool
}

func main() {
	s := &server{out: json.NewEncoder(os.Stdout), notes: []string{}}
	in := bufio.NewScanner(os.Stdin)
	// A message can be longer than the 64 KiB that a Scanner takes by default.
	in.Buffer(nil, 4<<20)
	for in.Scan() {
		var m message
		if err := json.Unmarshal(in.Bytes(), &m); err != nil {
			fmt.Fprintln(os.Stderr, "not JSON:", err) // stderr goes into the relay's log
			continue
		}
		if len(m.ID) == 0 { // notifications/initialized, notifications/cancelled
			continue
		}
		answer := message{JSONRPC: "2.0", ID: m.ID}
		answer.Result, answer.Error = s.handle(m.Method, m.Params)
		s.send(answer)
	}
	// The relay closes stdin to stop the plugin.
}

// send writes one message. json.Encoder ends it with a newline, as the transport requires.
func (s *server) send(m message) {
	if err := s.out.Encode(m); err != nil {
		os.Exit(1) // the relay is gone
	}
}

// handle answers a request. These are all the methods that the relay calls: the relay is
// the MCP client of the plugin.
func (s *server) handle(method string, params json.RawMessage) (any, *rpcError) {
	switch method {
	case "initialize":
		return object{
			"protocolVersion": "2025-11-25",
			"serverInfo":      object{"name": "notes", "version": "1.0.0"},
			"capabilities":    object{"tools": object{}, "resources": object{"subscribe": true}},
		}, nil
	case "ping":
		return object{}, nil
	case "tools/list": // the relay offers what plugin.json declares; names are enough here
		return object{"tools": []object{
			{"name": "notes.add", "inputSchema": object{"type": "object"}},
			{"name": "notes.search", "inputSchema": object{"type": "object"}},
		}}, nil
	case "tools/call":
		return s.call(params)
	case "resources/list":
		return object{"resources": []object{{"uri": allURI, "name": "all"}}}, nil
	case "resources/read":
		text, _ := json.Marshal(s.notes) // strings
		return object{"contents": []object{{"uri": allURI, "mimeType": "application/json", "text": string(text)}}}, nil
	case "resources/subscribe":
		s.subscribed = true
		return object{}, nil
	case "resources/unsubscribe":
		s.subscribed = false
		return object{}, nil
	}
	return nil, &rpcError{Code: -32601, Message: "no method " + method}
}

// call runs a tool. The relay has validated the arguments against the inputSchema of
// plugin.json, so they need no further checks.
func (s *server) call(params json.RawMessage) (any, *rpcError) {
	var p struct {
		Name      string `json:"name"`
		Arguments struct {
			Text string `json:"text"`
			Word string `json:"word"`
		} `json:"arguments"`
	}
	if err := json.Unmarshal(params, &p); err != nil {
		return nil, &rpcError{Code: -32602, Message: "invalid params of tools/call"}
	}
	switch p.Name {
	case "notes.add":
		s.notes = append(s.notes, p.Arguments.Text)
		if s.subscribed {
			uri, _ := json.Marshal(object{"uri": allURI}) // strings
			s.send(message{JSONRPC: "2.0", Method: "notifications/resources/updated", Params: uri})
		}
		return result(object{"number": len(s.notes)}), nil
	case "notes.search":
		found := []string{}
		for _, n := range s.notes {
			if strings.Contains(n, p.Arguments.Word) {
				found = append(found, n)
			}
		}
		return result(object{"notes": found}), nil
	}
	return nil, &rpcError{Code: -32602, Message: "no tool " + p.Name}
}

// result is structured content, and the same as text for clients that want text.
func result(v object) object {
	text, _ := json.Marshal(v) // plain values
	return object{"structuredContent": v, "content": []object{{"type": "text", "text": string(text)}}}
}
