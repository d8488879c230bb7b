/* The seven functions of libcuda.so.1 that graphs are made with. What was called is kept in `said`; `fails` names the one that fails. */
#include <stdio.h>
#include <string.h>

char said[4096], fails[64];
static int graph, executable;

static int call(const char *name, void *stream) {
    snprintf(said + strlen(said), sizeof said - strlen(said), "%s %zu;", name, (size_t)stream);
    return strcmp(name, fails) == 0 ? 900 : 0;
}

int cuStreamBeginCapture_v2(void *stream, int mode) { return mode == 2 ? call("begin", stream) : 1; }
int cuStreamEndCapture(void *stream, void **found) {
    int status = call("end", stream);
    *found = status || strcmp("no graph", fails) == 0 ? 0 : &graph;
    return status;
}
int cuGraphInstantiateWithFlags(void **found, void *from, unsigned long long flags) {
    *found = &executable;
    return flags || from != &graph ? 1 : call("instantiate", 0);
}
int cuGraphDestroy(void *which) { return which == &graph ? call("destroy", 0) : 1; }
int cuGraphLaunch(void *which, void *stream) { return which == &executable ? call("launch", stream) : 1; }
int cuGraphExecDestroy(void *which) { return which == &executable ? call("close", 0) : 1; }
int cuGetErrorString(int status, const char **words) {
    *words = status == 900 ? "operation not permitted when stream is capturing" : 0;
    return 0;
}
