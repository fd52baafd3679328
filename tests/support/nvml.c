/* A stand-in for the NVIDIA driver's library, for tests on machines without one: the real binding loads it.
 *
 * NVML_GPUS names a file with a line a GPU: "UUID bytes", or "MIG" and its parts as "UUID:bytes,...". Without the file
 * the driver is in trouble, as in a container that has lost its GPUs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 16
typedef struct { char uuid[96]; unsigned long long bytes; int parts; int first; } Gpu;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory2;

static Gpu gpus[MOST], parts[MOST];
static unsigned count;

static void add_parts(Gpu *gpu, char *text) {
    static int next;
    if (gpu == gpus) next = 0;
    gpu->first = next;
    for (char *word = strtok(text, ","); word; word = strtok(NULL, ",")) {
        sscanf(word, "%95[^:]:%llu", parts[next].uuid, &parts[next].bytes);
        next++, gpu->parts++;
    }
}

static int start(void) {
    FILE *file = fopen(getenv("NVML_GPUS"), "r");
    char line[512], rest[400];
    if (!file) return 999;
    for (count = 0; count < MOST && fgets(line, sizeof line, file); count++) {
        memset(&gpus[count], 0, sizeof(Gpu));
        if (sscanf(line, "MIG %399s", rest) == 1) add_parts(&gpus[count], rest);
        else sscanf(line, "%95s %llu", gpus[count].uuid, &gpus[count].bytes);
    }
    fclose(file);
    return 0;
}

int nvmlInit_v2(void) { return start(); }
int nvmlInitWithFlags(unsigned flags) { return start(); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 999 ? "Unknown Error" : "Not Found"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.65.06", size); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 13000; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetCount_v2(unsigned *found) { *found = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) { *gpu = &gpus[index]; return 0; }
int nvmlDeviceGetUUID(Gpu *gpu, char *text, unsigned size) { strncpy(text, gpu->uuid, size); return 0; }
int nvmlDeviceGetName(Gpu *gpu, char *text, unsigned size) { strncpy(text, "Pretended GPU", size); return 0; }
int nvmlDeviceGetMemoryInfo(Gpu *gpu, Memory *memory) { memory->total = gpu->bytes; return 0; }
int nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory2 *memory) { memory->total = gpu->bytes; return 0; }
int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *now, unsigned *later) { *now = *later = gpu->parts > 0; return 0; }
int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *most) { *most = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, Gpu **part) {
    if ((int)index >= gpu->parts) return 6;
    *part = &parts[gpu->first + index];
    return 0;
}
